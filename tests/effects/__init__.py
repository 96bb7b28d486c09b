"""The rooms that do something: fan-out, ledger, the client of replicas."""
