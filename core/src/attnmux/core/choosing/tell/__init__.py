"""The answer: a decision or a refusal, and a verdict on every candidate."""
