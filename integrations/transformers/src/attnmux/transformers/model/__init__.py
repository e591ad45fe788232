"""The computation of a model, found in its own modules and connected to the backend."""
