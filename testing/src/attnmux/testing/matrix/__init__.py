"""`attnmux matrix`: the support matrix, read from the cards alone."""
