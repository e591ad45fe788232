"""Finds settings, the plugins that they admit, and devices. No torch."""
