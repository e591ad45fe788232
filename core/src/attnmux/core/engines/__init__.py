"""Tools for engines beside the contract: a chooser, contexts, draft trees, interface checks."""
