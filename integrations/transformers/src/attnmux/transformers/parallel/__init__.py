"""Models on several ranks. Loaded only there: it needs attnmux-distributed."""
