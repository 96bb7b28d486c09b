"""The store: one contract over both engines, its failures, and its URLs."""
