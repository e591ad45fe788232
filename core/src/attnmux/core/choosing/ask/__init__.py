"""The question: a request, read from a model's config.json too, and the asker's policy."""
