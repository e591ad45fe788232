"""Tools for engines next to the contract: a chooser, contexts, draft trees, interface checks."""
