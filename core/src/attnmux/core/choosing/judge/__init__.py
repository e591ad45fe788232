"""One card in one phase: whether it serves the request, and the reasons if it does not."""
