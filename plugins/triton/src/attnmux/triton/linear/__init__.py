"""The backend of linear layers: a token at a time, or in chunks for prompts."""
