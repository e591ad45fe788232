"""The answer: a decision or a refusal, a verdict on every candidate, outcomes in words."""
