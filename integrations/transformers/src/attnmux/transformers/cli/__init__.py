"""`attnmux generate`: its options, input, run and output."""
