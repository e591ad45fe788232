"""Attention over several devices. Import from here, not from the modules."""
