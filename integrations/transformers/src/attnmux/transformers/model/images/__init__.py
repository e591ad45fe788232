"""Images in a model: the vision tower on its backend, and what the decoder takes from it."""
