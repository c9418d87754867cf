"""The secret that launchers share: where it comes from, and warnings about it."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from meshrun.errors import HostError
from meshrun.rendezvous import secret as module
from meshrun.rendezvous.secret import find_secret, secret_warnings
from tests.plans import config_of


def secret(env: dict[str, str], *, run_id: str | None = "job", own: str | None = None) -> bytes:
    return find_secret(env, config_of(run_id=run_id, secret=own))


@pytest.fixture(autouse=True)
def read_again() -> None:
    module._content.cache_clear()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("hidden\n")
    path.chmod(0o600)
    return path


def test_a_secret_comes_from_a_variable_a_file_or_the_scheduler(file: Path) -> None:
    """In this order; the same text is the same secret, wherever it comes from."""
    by_file = {"MESHRUN_SECRET_FILE": str(file)}
    hidden = secret({"MESHRUN_SECRET": "hidden"})

    assert secret(by_file) == secret({}, own="hidden") == hidden
    assert secret({**by_file, "MESHRUN_SECRET": "other"}) != hidden
    assert secret(by_file, own="other") == hidden
    assert secret({}) != hidden


def test_launches_are_kept_apart_by_their_run_ids() -> None:
    """With or without a secret."""
    for env in ({}, {"MESHRUN_SECRET": "hidden"}):
        found = {secret(env, run_id=name) for name in ("a", "b", None)}
        assert len(found) == 3


def test_any_bytes_may_be_a_secret(file: Path) -> None:
    """Even if they are not text."""
    file.write_bytes(b"\xff\x00\xfe")

    assert secret({"MESHRUN_SECRET_FILE": str(file)}) != secret({})
    assert secret({"MESHRUN_SECRET": "\udcff"}) != secret({})


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_file_is_no_secret(file: Path, text: str) -> None:
    """It does not mean that there is none, which would let anybody in."""
    file.write_text(text)

    with pytest.raises(HostError, match="is empty"):
        secret({"MESHRUN_SECRET_FILE": str(file)})


def test_the_hint_makes_a_file_that_nobody_else_can_read(tmp_path: Path) -> None:
    """Whatever the umask, and wherever it is."""
    (path := tmp_path / "a job's secret").touch()
    by_file = {"MESHRUN_SECRET_FILE": str(path)}
    with pytest.raises(HostError) as raised:
        secret(by_file)
    path.unlink()
    command = str(raised.value.hint).partition("`")[2].rpartition("`")[0]
    subprocess.run(["sh", "-c", f"umask 022; {command}"], check=True)
    module._content.cache_clear()

    assert path.stat().st_mode & 0o777 == 0o600
    assert secret(by_file) != secret({})
    assert warnings_of(by_file) == []


def test_a_pipe_or_a_file_that_is_removed_is_read_once(file: Path) -> None:
    """As of ``MESHRUN_SECRET_FILE=<(pass show job)``; a launcher asks for it several times."""
    reader, writer = os.pipe()
    os.write(writer, LONG.encode())
    os.close(writer)
    by_pipe = {"MESHRUN_SECRET_FILE": f"/dev/fd/{reader}"}
    by_file = {"MESHRUN_SECRET_FILE": str(file)}
    found = secret(by_pipe), secret(by_file)
    file.unlink()

    assert found == (secret({"MESHRUN_SECRET": LONG}), secret({"MESHRUN_SECRET": "hidden"}))
    assert found == (secret(by_pipe), secret(by_file))
    assert warnings_of(by_pipe) == []
    assert len(warnings_of(by_file)) == 1  # it is short
    os.close(reader)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    """The error names the file."""
    with pytest.raises(HostError, match="absent`: No such file"):
        secret({"MESHRUN_SECRET_FILE": str(tmp_path / "absent")})


LONG = "x" * 44


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o400, False), (0o644, True),
                                             (0o640, True)])  # fmt: skip
def test_a_file_that_others_may_read_has_a_warning(file: Path, mode: int, warns: bool) -> None:
    """In one line, with what to type; not if the variable is set, which takes precedence."""
    file.write_text(LONG)
    file.chmod(mode)
    env = {"MESHRUN_SECRET_FILE": str(file)}
    found = warnings_of(env)

    assert len(found) == warns
    assert all(f"(mode {mode:04o})" in line and f"chmod 600 {file}" in line for line in found)
    assert warnings_of({**env, "MESHRUN_SECRET": LONG}) == []


def warnings_of(env: dict[str, str], own: str | None = None) -> list[str]:
    return secret_warnings(env, config_of(run_id="job", secret=own))


def test_a_short_secret_has_a_warning(file: Path) -> None:
    """It gives the length but not the text, wherever the secret comes from; none is not short."""
    file.write_text("hunter2")
    for found in (warnings_of({"MESHRUN_SECRET": "hunter2"}), warnings_of({}, own="hunter2"),
                  warnings_of({"MESHRUN_SECRET_FILE": str(file)})):  # fmt: skip
        assert len(found) == 1
        assert " 7 characters" in found[0]
        assert "hunter2" not in found[0]
    assert warnings_of({}) == warnings_of({"MESHRUN_SECRET": "of sixteen chars"}) == []


def test_a_secret_that_a_person_chose_is_stretched(monkeypatch: pytest.MonkeyPatch) -> None:
    """So each guess is costly; a generated one cannot be guessed, and is not stretched."""
    rounds: list[int] = []
    stretch = hashlib.pbkdf2_hmac

    def counted(name: str, text: bytes, salt: bytes, count: int) -> bytes:
        rounds.append(count)
        return stretch(name, text, salt, 1)

    monkeypatch.setattr(hashlib, "pbkdf2_hmac", counted)
    found = {secret({"MESHRUN_SECRET": text}) for text in ("hunter2", "hunter3", LONG, "")}

    assert len(found) == 4
    assert len(rounds) == 2
    assert min(rounds) >= 600_000
