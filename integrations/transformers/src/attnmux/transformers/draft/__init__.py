"""Drafts of the next tokens: who guesses them, draft models and heads, and steps that verify."""
