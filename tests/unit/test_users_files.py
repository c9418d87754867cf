"""Which Python files are the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrun.host.users_files import is_users_file


def test_what_pip_installed_to_a_target_is_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "library-1.0.dist-info").mkdir()
    module = str(tmp_path / "library.py")

    assert is_users_file(module)
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_users_file(module)
    monkeypatch.setenv("PWD", str(tmp_path))  # a program deployed together with its packages
    assert is_users_file(module)
