"""Draft trees: how they are built, verified by probabilities, and run in a launch each."""
