"""What a model computes, found in its own modules and led to the backend."""
