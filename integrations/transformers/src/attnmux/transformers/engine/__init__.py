"""Continuous batching: requests come and go while every step runs those that are there."""
