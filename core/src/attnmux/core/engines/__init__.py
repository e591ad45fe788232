"""What engines use next to the contract: a chooser for a device, draft trees, interface checks."""
