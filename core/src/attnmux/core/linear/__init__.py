"""Recurrent and convolutional layers: their contract, and hybrids with attention."""
