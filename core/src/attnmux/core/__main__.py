"""`python -m attnmux.core` is the command `attnmux`."""

from attnmux.core.cli import main

main()
