"""The work of a verb while it imports."""

from __future__ import annotations

import gc
import threading

import pytest

from attnmux.core import Plugins, Settings
from attnmux.core.verbs import Run


@pytest.mark.parametrize("fails", [False, True])
def test_probes_are_asked_once_while_a_verb_imports(monkeypatch, fails: bool) -> None:
    calls: list[threading.Thread] = []
    real = Plugins.detect

    def detect(self, **place):
        calls.append(threading.current_thread())
        if fails:
            raise OSError("no process")
        return real(self, **place)

    monkeypatch.setattr(Plugins, "detect", detect)
    run, settings = Run(), Settings.load()
    collects = gc.isenabled()
    with run.importing(settings):
        assert not gc.isenabled()
    assert gc.isenabled() is collects
    plugins = run.plugins(settings)
    if fails:
        with pytest.raises(OSError, match="no process"):
            run.detect(plugins)
    else:
        assert run.detect(plugins).platforms
    assert len(calls) == 1
    assert calls[0] is not threading.main_thread()
    assert run.plugins(Settings.load()) is not plugins
