"""Intel's kernel libraries without the CPU or GPU that they need."""
