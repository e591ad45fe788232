"""For every room: read-only containers, checks of given values, and verdicts."""
