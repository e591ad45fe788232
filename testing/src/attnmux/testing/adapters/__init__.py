"""Tests that adapters of kernel libraries pass besides the suite. Importing them needs pytest."""
