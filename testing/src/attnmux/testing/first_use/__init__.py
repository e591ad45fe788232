"""A few cases in the shapes of a request, run before a backend first serves it."""
