"""Discovery: the sources that list replicas, each in the same words (`fleet.facts.endpoint`)."""
