"""Folders and files that other users may write to, or have put in the way."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from meshrun.cli.completion import _add_line
from meshrun.cli.parsers import text_of_file
from meshrun.errors import HostError, UsageError
from meshrun.host.folder import (
    Folder,
    make_folder,
    open_private,
    private_folder,
    remove_if_stale,
    write_private,
)
from meshrun.host.named_files import check_target, read_small, who_else_may_write, write_whole
from meshrun.host.reactor import Reactor
from meshrun.protocol.codec import PACKET_BYTES
from meshrun.protocol.error_record import read_record
from meshrun.protocol.packing import pack
from meshrun.rendezvous.secret import read_secret
from meshrun.report.node_history import record_failure
from meshrun.supervisor.timers import Timers
from meshrun.warm.server_folder import ServerFolder
from meshrun.worker.function import _store, open_own
from tests.kit import within
from tests.plans import config_of

OTHER = 12345
"""The number of a user and of a group that no one has."""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.mark.parametrize(
    ("mode", "owner", "group", "found"),
    [
        (0o755, -1, -1, None),
        (0o1777, -1, -1, None),
        (0o775, -1, -1, None),
        (0o777, -1, -1, "everyone can write to `{}`"),
        pytest.param(0o755, OTHER, -1, f"`{{}}` belongs to user {OTHER}", marks=as_root),
        pytest.param(0o1777, OTHER, -1, f"`{{}}` belongs to user {OTHER}", marks=as_root),
        pytest.param(0o775, -1, OTHER, f"group {OTHER} can write to `{{}}`", marks=as_root),
        pytest.param(0o1775, -1, OTHER, None, marks=as_root),
    ],
)
def test_who_else_may_write(
    mode: int, owner: int, group: int, found: str | None, tmp_path: Path
) -> None:
    """To a folder, to one above it, or to one above a folder that does not exist yet."""
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    os.chown(folder, owner, group)
    folder.chmod(mode)
    (tmp_path / "link").symlink_to(folder / "below")
    asked = [folder, folder / "below", folder / "new" / "newer", tmp_path / "link"]

    expected = found and found.format(folder)
    assert [who_else_may_write(str(path)) for path in asked] == [expected] * 4


@as_root
def test_the_owner_of_a_link_may_exchange_what_is_behind_it(tmp_path: Path) -> None:
    """A link that leads to this user's folder, also by way of a link of this user's."""
    (tmp_path / "folder").mkdir()
    (theirs := tmp_path / "theirs").symlink_to(tmp_path / "folder")
    os.lchown(theirs, OTHER, -1)
    (tmp_path / "ours").symlink_to("theirs")
    asked = [theirs, theirs / "new", tmp_path / "ours", tmp_path / "folder" / ".." / "theirs"]

    for path in asked:
        assert str(who_else_may_write(str(path))).endswith(f"theirs` belongs to user {OTHER}")


@as_root
def test_files_of_root_in_a_user_namespace(tmp_path: Path) -> None:
    """They belong to nobody there, like those of all users without a mapping."""
    os.chown(tmp_path, OTHER, -1)
    ask = "from meshrun.host.named_files import who_else_may_write as ask; print(ask(sys.argv[1]))"
    python = [sys.executable, "-c", f"import sys; {ask}", str(tmp_path)]

    found = [
        subprocess.run([*around, *python], capture_output=True, text=True, check=True).stdout
        for around in ([], within("--user", "--map-root-user", prepare="true"))
    ]
    assert found == [f"`{tmp_path}` belongs to user {OTHER}\n", "None\n"]


def test_a_file_that_takes_the_place_of_an_unfinished_one_keeps_its_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a link may, in a folder where everyone may replace files."""
    (private := tmp_path / "private").touch(mode=0o600)
    make = tempfile.mkstemp

    def exchange(**kwargs: str) -> tuple[int, str]:
        descriptor, path = make(**kwargs)
        os.unlink(path)
        os.symlink(private, path)
        return descriptor, path

    monkeypatch.setattr("tempfile.mkstemp", exchange)
    write_whole(str(tmp_path / "file"), "text", "--output")

    assert private.stat().st_mode & 0o777 == 0o600


def test_a_held_folder_is_the_one_that_was_made(tmp_path: Path) -> None:
    """And not a folder that took its name later; links in it are not followed."""
    folder = make_folder(str(tmp_path / "mine"))
    (tmp_path / "mine").rename(tmp_path / "moved")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").touch()
    (tmp_path / "moved" / "link").symlink_to(tmp_path / "mine", target_is_directory=True)
    folder.make("below")
    os.close(folder.open(f"{folder.path}/below/file", os.O_WRONLY | os.O_CREAT))
    with pytest.raises(OSError, match="Too many levels"):
        folder.open(f"{folder.path}/link", os.O_RDONLY)
    assert (tmp_path / "moved" / "below" / "file").exists()
    folder.remove()
    folder.close()

    assert list((tmp_path / "moved").iterdir()) == []
    assert (tmp_path / "mine" / "precious").exists()
    (tmp_path / "other").symlink_to(tmp_path)
    with pytest.raises(OSError, match="Not a directory"):
        Folder(str(tmp_path / "other"))


def test_only_leftover_folders_are_removed(tmp_path: Path) -> None:
    """With meshrun's name, this user as the owner, and a lock that no process holds."""
    for name in ("meshrun_unlocked", "another"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
    (tmp_path / "another" / "held").write_text(os.uname().nodename)
    (tmp_path / "meshrun_link").symlink_to(tmp_path / "another")
    with private_folder() as held:
        for path in [*map(str, tmp_path.iterdir()), held]:
            remove_if_stale(path)
        assert Path(held, "held").exists()
        folder = os.open(held, os.O_RDONLY)
        with pytest.raises(BlockingIOError):  # so that systemd-tmpfiles keeps it
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(folder)
        (forgotten := Path(held).with_name("meshrun_forgotten")).mkdir()
        (forgotten / "held").write_text(os.uname().nodename)
        remove_if_stale(str(forgotten))

    assert not forgotten.exists()
    assert not Path(held).exists()
    assert len(list(tmp_path.rglob("precious"))) == 2


def test_writing_to_a_pipe_keeps_it(tmp_path: Path) -> None:
    """And writing through a link keeps the link, and its target's mode."""
    os.mkfifo(pipe := tmp_path / "pipe")
    (link := tmp_path / "link").symlink_to("pipe")
    (kept := tmp_path / "kept").write_text("old")
    kept.chmod(0o604)
    (to_kept := tmp_path / "to_kept").symlink_to(kept)
    with pytest.raises(HostError, match="no reader"):
        write_whole(str(link), "new", "--report", is_private=True)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_whole(str(link), "new", "--output")
    reader.join()
    write_whole(str(to_kept), "new", "--report", is_private=True)
    write_whole(str(tmp_path / "made"), "new", "--report", is_private=True)

    assert read == ["new"]
    assert (pipe.is_fifo(), link.is_symlink(), to_kept.is_symlink()) == (True, True, True)
    assert (kept.read_text(), kept.stat().st_mode & 0o777) == ("new", 0o604)
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "link", "kept", "to_kept", "made"}


@as_root
def test_files_of_another_user_are_not_written(tmp_path: Path) -> None:
    """In a folder where anyone may create files; elsewhere they are accepted."""
    (precious := tmp_path / "precious").write_text("kept")
    for mode, is_taken in ((0o1777, False), (0o755, True)):
        (folder := tmp_path / oct(mode)).mkdir()
        folder.chmod(mode)
        (link := folder / "link").symlink_to(precious)
        os.mkfifo(pipe := folder / "pipe")
        (file := folder / "file").touch(mode=0o666)
        for path in (link, pipe, file):
            os.chown(path, OTHER, OTHER, follow_symlinks=False)
            if is_taken:
                check_target(str(path), "--report")
                continue
            with pytest.raises(UsageError, match="belongs to another user"):
                check_target(str(path), "--report")
            with pytest.raises(UsageError, match="belongs to another user"):
                write_whole(str(path), "new", "--report")
            notes: list[str] = []
            record_failure(str(path), "host", "1", "why", notes.append)
            assert notes == [f"--node-history: `{path}` belongs to another user"]

    for to in ("link", "pipe", "file"):  # through one's own link to it, or to a folder on the way
        (mine := tmp_path / f"to_{to}").symlink_to(f"{oct(0o1777)}/{to}")
        with pytest.raises(UsageError, match="belongs to another user"):
            write_whole(str(mine), "new", "--report")
    (folder := tmp_path / oct(0o1777) / "folder").symlink_to(tmp_path)
    os.chown(folder, OTHER, OTHER, follow_symlinks=False)
    (tmp_path / "to_folder").symlink_to(folder)
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "to_folder" / "new", folder / ".." / "new"):
        with pytest.raises(UsageError, match="belongs to another user"):
            write_whole(str(path), "new", "--report")
    with pytest.raises(UsageError):
        write_whole(str(tmp_path / "loop" / "new"), "new", "--report")

    write_whole(str(file), "new", "--report", is_private=True)
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("new", 0o600)
    assert precious.read_text() == "kept"


@as_root
def test_only_this_user_s_files_are_unpickled(tmp_path: Path) -> None:
    """Others can replace a folder and move files, but can create neither as this user's."""
    (mine := tmp_path / "mine").write_bytes(b"a call")
    (link := tmp_path / "link").symlink_to(mine)
    (theirs := tmp_path / "theirs").write_bytes(b"a call")
    os.chown(theirs, OTHER, OTHER)
    (folder := tmp_path / "folder").mkdir()
    os.chown(folder, OTHER, OTHER)
    (moved := folder / "moved").write_bytes(b"a call")
    with open_own(str(mine)) as file:
        assert file.read() == b"a call"
    for path in (theirs, moved):
        with pytest.raises(PermissionError, match="belongs to another user"):
            open_own(str(path))
    with pytest.raises(OSError, match="Too many levels"):
        open_own(str(link))


def test_an_answer_that_cannot_be_stored_names_the_file(tmp_path: Path) -> None:
    """As in a folder that was removed, or on a full disk."""
    lost = "No such file or directory, so what rank 3 returned is lost: '{}/3.pkl'"
    with pytest.raises(FileNotFoundError, match=lost.format(tmp_path / "gone")):
        _store(str(tmp_path / "gone"), 3, (0, 4, None), "a value")


@as_root
def test_a_folder_with_a_lock_of_another_user_is_kept(tmp_path: Path) -> None:
    """Whoever may write to it and rename it must not have it removed."""
    (open_to_all := tmp_path / "meshrun_renamed").mkdir()
    (lock := open_to_all / "held").write_text(os.uname().nodename)
    os.chown(lock, OTHER, OTHER)
    remove_if_stale(str(open_to_all))
    assert lock.exists()
    os.chown(lock, 0, 0)
    remove_if_stale(str(open_to_all))
    assert not open_to_all.exists()


@as_root
def test_a_private_file_is_in_this_user_s_folder(tmp_path: Path) -> None:
    """Not in another user's folder in its place, nor where a link leads."""
    (precious := tmp_path / "precious").write_text("kept")
    (mine := tmp_path / "mine").mkdir()
    with open(mine / "file", "w", opener=open_private) as file:
        file.write("new")
    assert (mine / "file").stat().st_mode & 0o777 == 0o600
    (mine / "link").symlink_to(precious)
    (tmp_path / "to_mine").symlink_to(mine, target_is_directory=True)
    (theirs := tmp_path / "theirs").mkdir(mode=0o777)
    os.chown(theirs, OTHER, OTHER)
    with pytest.raises(OSError, match="Too many levels"):
        open_private(str(mine / "link"), os.O_WRONLY | os.O_CREAT)
    for path in (tmp_path / "to_mine" / "other", theirs / "file"):
        with pytest.raises(OSError, match=r"Not a directory|another user"):
            open_private(str(path), os.O_WRONLY | os.O_CREAT)
        with pytest.raises(OSError, match=r"Not a directory|another user"):
            write_private(str(path), "new")
    write_private(str(mine / "link"), "new")

    assert (mine / "link").read_text() == "new"
    assert precious.read_text() == "kept"
    assert (os.listdir(theirs), sorted(os.listdir(mine))) == ([], ["file", "link"])


def test_a_private_file_is_whole_or_absent(tmp_path: Path) -> None:
    """On a full disk too, here a limit on the size of files; half of it would be invalid."""
    program = (
        "import resource, sys\n"
        "from meshrun.host.folder import write_private\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "write_private(sys.argv[1], 'x' * 100)\n"
        "write_private(sys.argv[2], 'x' * 101)\n"
    )
    paths = [tmp_path / "whole", tmp_path / "too long"]
    done = subprocess.run(
        [sys.executable, "-c", program, *paths], capture_output=True, text=True, check=False
    )

    assert "File too large" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
    assert paths[0].read_text() == "x" * 100


@pytest.mark.parametrize(
    ("path", "error"),
    [("", "expects a file"), (".", "expects a file"), ("no/x", "`no` does not exist")],
)
def test_a_path_that_names_no_file_is_an_error(path: str, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        check_target(path, "--report")


def test_an_error_file_that_cannot_be_parsed_is_ignored(tmp_path: Path) -> None:
    """The program may have written it."""
    path = tmp_path / "error.json"
    for text in ("", "[]", "[" * 100_000, '{"message": {}}'):
        path.write_text(text)
        assert read_record(str(path), 0, os.open) is None


@pytest.mark.parametrize("head", ["", "ValueError: "])
def test_a_long_error_file_fits_into_a_message(head: str, tmp_path: Path) -> None:
    """As what a rank reports does: reports of all ranks of a node are sent to the first one."""
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": head + "x" * 3_000_000}))
    found = read_record(str(path), 0, os.open)

    assert found is not None
    assert len(pack(found)) < PACKET_BYTES


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo, lambda path: path.symlink_to(path.parent)])
def test_what_has_the_name_of_the_servers_folder_is_not_followed(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    """Another user may have put it into /tmp."""
    make(path := tmp_path / "meshrun-0")
    with pytest.raises(PermissionError, match=f"^`{path}` is not a folder$"):
        ServerFolder(str(path))
    with pytest.raises(OSError, match=f"^cannot create `{path}-1/2`: No such file or directory$"):
        ServerFolder(f"{path}-1/2")


def test_a_timer_pipe_replaces_only_a_pipe(tmp_path: Path) -> None:
    """It is removed with its launch, unless something else has its name by then."""

    def make(path: Path) -> Timers:
        return Timers(str(path), Reactor(), zygote_pid=os.getpid, note=str)

    (precious := tmp_path / "precious").write_text("kept")
    (link := tmp_path / "link").symlink_to(precious)
    for path in (precious, link):
        with pytest.raises(HostError, match="cannot create"):
            make(path)
    os.mkfifo(pipe := tmp_path / "pipe")
    make(pipe).close()
    assert not pipe.exists()
    timers = make(pipe)
    precious.rename(pipe)
    timers.close()

    assert (pipe.read_text(), link.is_symlink()) == ("kept", True)


def test_invalid_messages_to_a_timer_pipe_are_ignored(tmp_path: Path) -> None:
    """Ranks and this user's other processes may write to it; a valid one after them is read."""
    notes: list[str] = []
    child = subprocess.Popen(["sleep", "1000"])
    valid = {"pid": child.pid, "scope_id": "a", "expiration_time": 1.0, "signal": signal.SIGTERM}
    invalid = [{"pid": -1}, {"pid": 0}, {"pid": 1 << 40}, {"signal": 999}, {"signal": -9},
               {"signal": 0}, {"pid": os.getpid()}, {"expiration_time": 10**400},
               {"scope_id": [], "signal": 999}]  # fmt: skip
    lines = [json.dumps({**valid, **each}) for each in invalid]
    with Reactor() as reactor:
        timers = Timers(str(tmp_path / "pipe"), reactor, zygote_pid=os.getpid, note=notes.append)
        with open(tmp_path / "pipe", "w") as pipe:
            pipe.write("\n".join([*lines, "[" * 20_000, "", "x" * 30_000, json.dumps(valid), ""]))
        reactor.run_until(lambda: bool(notes))
        timers.close()

    assert notes == [f"killed process {child.pid}: its timer `a` expired"]
    assert child.wait() == -signal.SIGTERM


def test_a_device_without_end_is_not_read_to_its_end() -> None:
    """For a list of hosts, a patch, a secret, a shell's own file, and what a scheduler names."""
    for read in (
        lambda path: text_of_file(path, "--hostfile"),
        lambda path: read_secret({"MESHRUN_SECRET_FILE": path}, config_of()),
        lambda path: _add_line(Path(path), "a line"),
        read_small,
    ):
        with pytest.raises((HostError, UsageError, OSError), match="more than 4 MiB of text"):
            read("/dev/zero")
