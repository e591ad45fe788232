"""Timing every backend on the same steps of one model's attention.

`workload.py`: what is timed. `subjects.py`: who takes part, and who does not, and why. `steps.py`:
a workload in pools of its own. `answers.py`: whether a backend answers rightly. `timing.py`: how
long it takes. `measuring.py`: all of it together. `conformance.py`: what has to be passed before
a measurement may change a choice.
"""
