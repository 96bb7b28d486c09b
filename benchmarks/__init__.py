"""Benchmarks: figures as ratios of one run, since machines are noisy. See docs/benchmarks.md."""
