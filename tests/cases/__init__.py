"""Whole-gateway tests: a real gateway and simulated replicas on real sockets, case by case.

What is asserted is what a trainer, a rollout client or a replica could see for itself.
"""
