"""Adapters of kernel libraries: the base class, the checks, and the forms of pages and rows."""
