"""What only the simulator has: faults, topologies, the log, pure generation, and its trainer."""
