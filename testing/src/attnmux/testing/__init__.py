"""The conformance suite that every backend passes, this project's and others'.

`AttentionBackendTests` is the suite for pytest; `attnmux verify NAME` runs the same cases. Both are
made of plain data and functions that need no pytest:

- `Case` is one model's attention over some `Step`s, which `decode`, `extend` and `verify` make;
  `standard_cases` lists the suite's, and `in_graphs` those that device graphs can serve.
- `find_candidate` makes a `Candidate`, a backend with its card and machine; `run_case` runs a case
  on it and compares all that it did with `reference`, dense attention in float64.
- `outside_points` lists requests just beyond a card's limits and those that no case can ask for,
  and `try_point` checks that the selector refuses one.
- `make_setup` and `prepare_step` make the pools, batch and tensors of a case, for tests that call
  a backend themselves.
- `RecordingGraphs` captures and replays steps without a device that has graphs.
- `Sampler` makes random cases of a card, and `run_in_children` runs cases in child processes.
- `FirstUse` runs a handful of cases in a model's shapes before a backend serves it.
- `CanaryBackend` checks a share of a backend's steps while it serves; `FailureKeeper` keeps a
  failed step, which `load_failure` reads and `run_again` repeats on any backend.
- `RequestCanary` now and then checks one request of a backend inside another engine, and keeps
  what differs in a `FailureFolder`.
- `FakeBackend` and `GraphFakeBackend` are correct and slow, with cards for `fake_platform`.

Importing this module imports neither torch nor pytest.
"""

from __future__ import annotations

from attnmux.core.plugin import lazy_face

__getattr__, __dir__ = lazy_face(__name__)
