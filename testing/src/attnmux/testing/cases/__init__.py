"""Cases and their steps, as plain data. Importing a module of this room imports no torch."""
