"""`attnmux generate`: its options, what it reads, runs and prints."""
