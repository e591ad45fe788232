"""AMD's kernel libraries without an AMD device."""
