"""The pure core: no clock, no socket, no store."""
