"""Times attention backends on the same steps. Importing this module imports no torch.

workload.py     the steps that are timed
shapes.py       shapes that a request leaves open
grid.py         the steps that are timed by default
entrants.py     which backends take part, and why the others do not
steps.py        a workload in pools of its own
linear_steps.py a workload of linear layers
linear_work.py  what such a step needs
subjects.py     how steps of attention and of linear layers are made and checked
answers.py      whether an answer is right
timing.py       how long calls take, several sides by turns
roofline.py     what a step needs, and what the device reaches
measuring.py    all of these together: rows of results
conformance.py  the check that a measurement needs before it may change a choice
ranks.py        figures of the slowest of several ranks
trials.py       the launches that a tuner tried, and those that win
keeping.py      the files that keep measurements and launches
margins.py      which backend is fastest, by how much, and which one is chosen
report.py       tables of figures, and the facts that they belong to
"""

from __future__ import annotations

from attnmux.core.plugin import lazy_face

__getattr__, __dir__ = lazy_face(__name__)
