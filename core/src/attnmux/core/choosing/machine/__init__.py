"""The machine: a platform's facts, the table of vendors, the CPU."""
