"""Calls after the import of a module."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from meshrun.worker.imports import when_imported


def test_a_call_follows_an_import_and_not_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs look for a module to see whether it is installed."""
    (tmp_path / "sought.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    calls: list[str] = []
    finders = list(sys.meta_path)
    when_imported("sought", lambda: calls.append("call"))

    assert find_spec("sought") is not None
    assert calls == []
    importlib.reload(importlib.import_module("sought"))
    assert calls == ["call"]
    assert sys.meta_path == finders
