"""Hosts that --hosts cannot use: each is named within --connect-timeout; no process is left."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.engines.over_ssh import MESH, SAYS, all_gone, launch
from tests.engines.sshd import MakeSshd, Sshd
from tests.engines.together import Launch, rank_lines
from tests.kit import ROOT, command, wait_until

pytestmark = pytest.mark.torch


def hide(sshd: Sshd, host: int, path: Path | str, *options: str) -> None:
    """Make a folder look empty on one host; ``options`` are those of its new file system."""
    done = sshd.hosts.run(host, ["mount", "-t", "tmpfs", *options, "none", path])
    assert done.returncode == 0, done.stderr


def _unreachable(sshd: Sshd) -> None:
    sshd.hosts.cut(1)


def _stopped_server(sshd: Sshd) -> None:
    sshd.servers[1].kill()
    sshd.servers[1].wait()


def _hung_server(sshd: Sshd) -> None:
    sshd.servers[1].send_signal(signal.SIGSTOP)


def _unknown_key(sshd: Sshd) -> None:
    known = sshd.folder / "known"
    known.write_text(re.sub(r".*node1.*\n", "", known.read_text()))


def _unwelcome(sshd: Sshd) -> None:
    (sshd.folder / "sshd_node1").write_text("")
    no_keys = sshd.folder / "no_keys"
    no_keys.write_text("")
    done = sshd.hosts.run(1, ["mount", "--bind", no_keys, sshd.folder / "id.pub"])
    assert done.returncode == 0, done.stderr


def _without_interpreter(sshd: Sshd) -> None:
    hide(sshd, 1, Path(command()[0]).parent)


def _without_meshrun(sshd: Sshd) -> None:
    hide(sshd, 1, ROOT / "meshrun")


def _other_version(sshd: Sshd) -> None:
    text = (ROOT / "meshrun" / "__init__.py").read_text()
    other = sshd.folder / "init.py"
    other.write_text(re.sub(r'__version__ = ".*"', '__version__ = "0.0.7"', text))
    done = sshd.hosts.run(1, ["mount", "--bind", other, ROOT / "meshrun" / "__init__.py"])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("names", ["127.0.0.1,node0", "node1,root@10.77.0.2"])
def test_a_machine_under_two_names_is_one_host(make_sshd: MakeSshd, names: str) -> None:
    """For the local host this is known at once, else once both have answered; nothing starts."""
    sshd = make_sshd(2)
    run = launch(sshd, "--mesh", "dp=2", SAYS, hosts=names)

    assert run.end() == 2
    one, other = (name.rpartition("@")[2] for name in names.split(","))
    assert run.text.startswith(f"error: {one} and {other} are the same machine"), run.text
    all_gone(sshd)


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (_unreachable, r"ssh failed: .*(timed out|No route to host)|no answer within"),
        (_stopped_server, "ssh failed: .*Connection refused"),
        (_hung_server, r"ssh failed: .*timed out|no answer within"),
        (_unknown_key, "ssh failed: .*Host key verification failed"),
        (_unwelcome, "ssh failed: .*Permission denied"),
        (_without_interpreter, f"it cannot run {command()[0]}"),
        (_without_meshrun, f"{command()[0]} there has no meshrun: .*No module named 'meshrun"),
        (_other_version, r"it has meshrun 0\.0\.7, but 0\.1\.0 is required"),
    ],
)
def test_a_host_that_cannot_be_used_is_named(
    make_sshd: MakeSshd, trouble: object, reason: str
) -> None:
    """With ssh's error, a hint and exit code 69; no rank starts anywhere."""
    sshd = make_sshd(3)
    trouble(sshd)  # type: ignore[operator]
    run = launch(sshd, "--connect-timeout", "20", "--mesh", "dp=3", SAYS)

    assert run.end() == 69, run.text
    assert re.search(rf"^error: host node1: ({reason})", run.text, re.MULTILINE), run.text
    assert "hint: " in run.text
    assert not rank_lines(run.text)
    all_gone(sshd)


def test_an_ssh_that_asks_is_not_waited_for(make_sshd: MakeSshd, tmp_path: Path) -> None:
    """A wrapper that asks for a password gets none, and its question is shown."""
    sshd = make_sshd(2)
    (asks := tmp_path / "asks").write_text('#!/bin/sh\nprintf "$0\'s password: " >&2; sleep 1000\n')
    asks.chmod(0o755)
    words = ("--ssh", asks, "--hosts", "node1", "--connect-timeout", "2", "--mesh", "dp=2", SAYS)
    run = Launch(sshd.hosts, 0, words)

    assert run.end() == 69, run.text
    assert f"error: host node1: no answer within 2 s: {asks}'s password:" in run.text
    assert "hint: ssh asked for input" in run.text
    all_gone(sshd)


@pytest.mark.nightly
@pytest.mark.usefixtures("fake_torch")
@pytest.mark.parametrize("has_room", [True, False])
def test_a_server_that_is_busy_is_tried_again(
    make_sshd: MakeSshd, tmp_path: Path, has_room: bool
) -> None:
    """Beyond MaxStartups it hangs up; it may have room again within --connect-timeout."""
    sshd = make_sshd(2)
    _stopped_server(sshd)
    sshd.servers[1] = sshd.serve(1, startups=1)
    holds = "import socket; s = socket.create_connection(('node1', 2222)); s.recv(1); input()"
    holder = sshd.hosts.popen(0, [sys.executable, "-c", holds], stdin=subprocess.PIPE)
    wait_until(lambda: len(sshd.processes(1)) > 0, lambda: "a connection to node1")
    ssh = tmp_path / "ssh.sh"
    ssh.write_text(f'#!/bin/sh\necho >> "$0.tries"; exec {sshd.ssh} "$@"\n')
    ssh.chmod(0o755)
    tries = Path(f"{ssh}.tries")
    words = ("--ssh", ssh, "--hosts", sshd.all, "--connect-timeout", "60" if has_room else "5")
    program = ("--nproc-per-node", "1", "--no-python", "echo", "done")
    run = Launch(sshd.hosts, 0, [*words, *program])
    wait_until(lambda: tries.exists() and len(tries.read_text()) > 1, lambda: run.text)
    if has_room:
        holder.communicate(b"\n")
    code = run.end()
    holder.communicate(b"\n" if not has_room else None)

    assert code == (0 if has_room else 69), run.text
    if not has_room:
        assert "error: host node1: ssh failed: kex_exchange_identification: " in run.text
    all_gone(sshd)


@pytest.mark.nightly
def test_a_missing_folder_is_named(make_sshd: MakeSshd, tmp_path: Path) -> None:
    """The working directory must exist on every host."""
    sshd = make_sshd(2)
    here = tmp_path / "place" / "here"
    here.mkdir(parents=True)
    hide(sshd, 1, tmp_path / "place")
    run = launch(sshd, *MESH, SAYS, cwd=here)

    assert run.end() == 69, run.text
    assert f"error: host node1: its folder {here}: No such file or directory" in run.text
    all_gone(sshd)


@pytest.mark.nightly
def test_every_host_that_cannot_be_used_is_named(make_sshd: MakeSshd) -> None:
    """All at once, not one after the other."""
    sshd = make_sshd(2)
    run = launch(sshd, "--mesh", "dp=3", SAYS, hosts="node0,nowhere1,nowhere2")

    assert run.end() == 69, run.text
    assert "error: cannot use 2 of 3 hosts" in run.text
    assert run.text.count("Could not resolve hostname") == 2
    all_gone(sshd)


@pytest.mark.usefixtures("fake_torch")
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_program_that_one_host_lacks(make_sshd: MakeSshd, tmp_path: Path, full: bool) -> None:
    """It is named at once, even if its agent's folder cannot hold its launcher's error."""
    sshd = make_sshd(2)
    (folder := tmp_path / "programs").mkdir()
    (program := folder / "a.py").write_text("print('hello')")
    hide(sshd, 1, folder)
    if full:
        hide(sshd, 1, tempfile.gettempdir(), "-o", "nr_inodes=3")
    run = launch(sshd, "--nproc-per-node", "1", program)

    assert run.end() == 2, run.text
    host = "" if full else "host node1: "
    assert f"error: {host}can't open file '{program}'" in run.text
    all_gone(sshd)


@pytest.mark.nightly
def test_a_program_that_is_nowhere(make_sshd: MakeSshd) -> None:
    """Every launcher may report it, but it is shown once."""
    sshd = make_sshd(2)
    run = launch(sshd, *MESH, "/nowhere.py")

    assert run.end() == 2, run.text
    assert run.text.count("can't open file '/nowhere.py'") == 1
    all_gone(sshd)


@pytest.mark.nightly
@pytest.mark.usefixtures("fake_torch")
@pytest.mark.parametrize("inodes", [2, 4])
def test_a_host_needs_no_room_for_temporary_files(make_sshd: MakeSshd, inodes: int) -> None:
    """With room for the agent's folder only, its launcher uses another one, or makes no files."""
    sshd = make_sshd(2)
    hide(sshd, 1, tempfile.gettempdir(), "-o", f"nr_inodes={inodes}")
    run = launch(sshd, "--nproc-per-node", "1", "--no-python", "echo", "done")

    assert run.end() == 0, run.text
    all_gone(sshd)


@pytest.mark.nightly
@pytest.mark.usefixtures("fake_torch")
def test_a_host_without_room_for_logs_is_named(make_sshd: MakeSshd, tmp_path: Path) -> None:
    """As the cause, although other hosts have room."""
    sshd = make_sshd(2)
    (logs := tmp_path / "logs").mkdir()
    hide(sshd, 1, str(logs), "-o", "nr_inodes=3")
    words = ("--nproc-per-node", "1", "--log-dir", str(logs), "--redirects", "1")
    run = launch(sshd, *words, "--no-python", "echo", "done")

    assert run.end() == 71, run.text
    last = run.text.splitlines()[-1]
    assert "error: on node1, cannot create" in last, run.text
    assert last.endswith("No space left on device"), run.text
    all_gone(sshd)
