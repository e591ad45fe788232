"""Requests with their tokens and memory: rows, slots, pools, prefixes and sampling."""
