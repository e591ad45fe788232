"""Imports, in the server that children fork from, whatever every architecture needs."""

from __future__ import annotations

from attnmux.core import Plugins
from attnmux.core.find.cpu import probe_cpu
from tools.models.recipe import Recipe
from tools.models.trial import try_alone

try_alone("GPT2Config", Recipe(), probe_cpu(), tuple(Plugins.load().offers()))
