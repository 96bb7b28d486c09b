"""The domain of the fleet gateway: replicas, rounds, the barrier, rank layout, and their effects.

Nothing here knows a web framework; `gateway` builds on this package and never the other way.
"""
