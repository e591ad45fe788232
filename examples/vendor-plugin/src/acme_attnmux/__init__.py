"""A vendor's plugin for attnmux. `plugin.py` is the first file to read."""
