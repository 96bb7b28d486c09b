"""What follows from what: the life of a weight update, membership, fences, fullness. Pure."""
