"""`attnmux verify NAME`: the suite on an installed backend, and what is kept and printed of it."""
