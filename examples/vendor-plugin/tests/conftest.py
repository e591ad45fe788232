"""The vendor's tests run on the simulated device, unless another is named."""

from __future__ import annotations

import os

os.environ.setdefault("ACME_SIMULATOR", "m2")
