"""Findings about releases of attention kernels, in `findings/`, and the verb that judges them.

plugin.py   offers the findings to the solver
judging.py  whether a finding concerns a machine and its libraries
audit.py    `attnmux audit`
"""
