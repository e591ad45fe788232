"""All cards: the best backends for all phases, with one page size and one KV dtype."""
