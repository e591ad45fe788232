"""Graphs for machines without a device that has them: operations recorded and run again."""
