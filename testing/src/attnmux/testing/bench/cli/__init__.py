"""The verbs `bench` and `tune`, the run behind `bench`, and their tables."""
