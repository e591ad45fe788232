"""Tools for engines beside the contract: a chooser for a device, draft trees, interface checks."""
