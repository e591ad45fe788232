"""Nothing that this machine's user has set reaches these tests."""

from __future__ import annotations

import os
from pathlib import Path

from attnmux.core import Settings


def test_nothing_is_configured_and_nothing_was_measured(tmp_path) -> None:
    assert Path.cwd() == tmp_path
    assert Settings.load() == Settings()
    assert not [name for name in os.environ if name.startswith("ATTNMUX_")]
    file = Settings.load().measurements_file()
    assert file is not None
    assert not file.exists()


def test_the_search_for_a_file_ends_in_the_folder_of_this_run(tmp_path, tmp_path_factory) -> None:
    nearest = next(f for f in tmp_path.parents if (f / "attnmux.toml").exists())
    assert nearest == tmp_path_factory.getbasetemp()
    assert (nearest / "attnmux.toml").read_bytes() == b""
