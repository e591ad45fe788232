"""Random cases from what a card claims, and requests that it must refuse. Imports no torch."""
