"""Which changes of watched files count."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from pathlib import Path

import pytest

from meshrun.cli.options import Options
from meshrun.cli.watch import WatchedFiles, watch_files
from meshrun.errors import HostError
from meshrun.protocol.caller import Invocation
from tests.plans import request_of

needs_watchfiles = pytest.mark.skipif(
    importlib.util.find_spec("watchfiles") is None, reason="no watchfiles"
)


def test_without_watchfiles_the_hint_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    request = request_of()
    with pytest.raises(HostError) as caught:
        watch_files(Options({}, {}, {}), request, Invocation(time.monotonic_ns()))

    assert caught.value.hint == "pip install 'meshrun[watch]'"


@needs_watchfiles
def test_other_content_is_a_change(tmp_path: Path) -> None:
    """Not another mtime or the same text again; a file that disappears or returns has changed."""
    one, other = tmp_path / "one.py", tmp_path / "package" / "other.py"
    other.parent.mkdir()
    for path in (one, other):
        path.write_text("x = 1")
    files = WatchedFiles()
    for path in (one, other):
        files.add(str(path))

    assert files.changed() == []
    os.utime(one, (1, 1))
    other.write_text("x = 1")
    assert files.changed() == []
    one.write_text("x = 2")
    assert files.changed() == [str(one)]
    assert files.changed() == []
    shutil.rmtree(other.parent)
    assert files.changed() == [str(other)]
    other.parent.mkdir()
    other.write_text("x = 1")
    assert files.changed() == [str(other)]
    one.unlink()
    os.mkfifo(one)
    assert files.changed() == [str(one)]
    (tmp_path / "third.py").write_text("")
    assert files.changed() == []
    assert files.beside() == {str(one), str(other), str(tmp_path / "third.py")}


@needs_watchfiles
def test_a_file_that_changed_before_it_was_known(tmp_path: Path) -> None:
    """A rank has read the earlier content."""
    path = tmp_path / "one.py"
    path.write_text("x = 1")
    files = WatchedFiles()
    files.add(str(path), path.stat().st_mtime_ns - 1)

    assert files.changed() == [str(path)]
    assert files.changed() == []
