"""What is known of replicas, rounds, calls and gateways: frozen values, and what they tell."""
