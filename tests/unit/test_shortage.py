"""A shortage of the machine's resources is reported as one, and a bug of meshrun is not."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import meshrun
from meshrun.errors import HostError
from meshrun.host import folder as folders
from meshrun.host.descriptors import allow_descriptors, allow_many_descriptors
from meshrun.host.folder import Folder, make_folder, writing_to
from meshrun.host.shortage import describe_shortage
from tests.kit import TOO_FEW_FILES

REFUSED = "the operating system refused what meshrun needs"
FULL = OSError(errno.ENFILE, os.strerror(errno.ENFILE))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FULL, f"{REFUSED}: Too many open files in system"),
        (OSError(errno.EIO, "I/O", "/a/b"), "cannot use `/a/b`: Input/output error"),
        (OSError(errno.EPERM, "no"), f"{REFUSED}: Operation not permitted"),
        (OSError(errno.ENOSYS, "no"), f"{REFUSED}: Function not implemented"),
        (OSError(errno.EPERM, "no", "/a/b"), None),
        (MemoryError(), "this machine is out of memory"),
        (
            ImportError("a.so: failed to map segment from shared object", path="/a.so"),
            "cannot use `/a.so`: Cannot allocate memory",
        ),
        (
            ImportError("cannot open shared object file: Too many open files", path="/a.so"),
            "cannot use `/a.so`: Too many open files",
        ),
        (ImportError("a.so: undefined symbol: b", path="/a.so"), None),
        (RuntimeError("can't start new thread"), "cannot start a thread"),
        (OSError(errno.EBADF, "Bad file descriptor"), None),
        (RuntimeError("dictionary changed size during iteration"), None),
        (OSError("no number"), None),
    ],
)
def test_which_errors_are_a_shortage(error: BaseException, message: str | None) -> None:
    """A shortage has a hint."""
    shortage = describe_shortage(error)

    assert message == (shortage and shortage.message)
    assert shortage is None or shortage.hint


def test_a_folder_that_cannot_be_opened_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One descriptor may be left, for the parent folder, and none for the new one."""

    def refuse(*_: object, **__: object) -> Folder:
        raise FULL

    monkeypatch.setattr(folders, "Folder", refuse)
    with pytest.raises(OSError, match="Too many"):
        make_folder(str(tmp_path / "new"))

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_read_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch does not fail because it cannot clean up."""

    def refuse(*_: object, **__: object) -> object:
        raise FULL

    made = make_folder(str(tmp_path / "new"))
    made.make("inside")
    monkeypatch.setattr(os, "fwalk", refuse)
    made.remove()
    made.close()

    assert (tmp_path / "new" / "inside").exists()


@pytest.mark.parametrize(
    "start",
    [lambda: meshrun.launch("x.py"), lambda: meshrun.WorkerGroup(nproc_per_node=1)],
    ids=["launch", "WorkerGroup"],
)
def test_a_program_that_cannot_start_a_launcher(
    start: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As all errors of a machine that cannot run a launch, it is a HostError."""

    def refuse(*_: object, **__: object) -> object:
        raise FULL

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(HostError, match="Too many open files in system\nhint: see /proc/sys/fs"):
        start()


@pytest.mark.parametrize(
    ("number", "hint"), [(errno.EMFILE, "ulimit -n"), (errno.EACCES, "set TMPDIR to a writable")]
)
def test_why_a_temporary_folder_cannot_be_written(number: int, hint: str) -> None:
    """Another folder does not help a process that is out of descriptors."""
    with pytest.raises(HostError, match=hint), writing_to("/tmp/a"):
        raise OSError(number, os.strerror(number))


def test_a_limit_that_may_not_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a seccomp profile: Python reports it as it reports a limit above the hard one."""

    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr("resource.getrlimit", lambda _: (70, 4096))
    monkeypatch.setattr("resource.setrlimit", refuse)
    allow_many_descriptors()
    with pytest.raises(HostError, match=f"this launch needs 80 {TOO_FEW_FILES} 70"):
        allow_descriptors(80)
