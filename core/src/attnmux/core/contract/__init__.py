"""The contract: what an engine hands over, and what a backend is. It stands on facts alone."""
