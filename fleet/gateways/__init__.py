"""The gateways of one fleet among each other: leases, questions, one gate out of all of theirs."""
