"""Backends made of backends. `building.py` makes them, as a decision says."""
