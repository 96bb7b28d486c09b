"""Replicas as they are: calling them, all at once; looking at them; having them restarted."""
