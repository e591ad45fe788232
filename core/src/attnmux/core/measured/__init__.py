"""Measurements of this machine, and the choices that they change."""
