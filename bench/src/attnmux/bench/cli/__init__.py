"""The verbs `bench` and `tune`."""
