"""Helpers for all tests: run real launches, wait for conditions, find leftover processes."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent
PROGRAMS = Path(__file__).parent / "programs"
FAKES = Path(__file__).parent / "fakes"
MARK = "PET_TEST_ID"  # a name that is sent to other hosts, and of which meshrun does not warn
"""Set in the environment of every process that a test starts, to find those left behind."""
_HANG_S = 90.0

# Prose of messages that many tests expect: a better sentence is a change of one line.
ZYGOTE = "the process that starts the ranks"
STORE = "the process that hosts the ranks' store"
ENDED_TOO = "and the ranks ended with it"
LEFT_TOO_EARLY = "exited with code 0 while other ranks still needed it"
LOST_PEER = "lost a connection to a peer"
NEW_INTERPRETERS = "starting a new interpreter per rank"
NONE_STARTED = "no rank was started"
NOT_A_LAUNCHER = "the other end is not a meshrun launcher"
SILENT = "no message from it for"
HUNG_UP = "it closed the connection"
WAS_LOST = " was lost: "
NO_PROGRESS = "no rank made progress for"
LEFT_BEHIND = "that the ranks left behind"
OF_ANOTHER_LAUNCH = "it belongs to another launch or has a different secret"
TOO_FEW_FILES = "open files, but the limit is"


def lost_node(node: int, host: str = "") -> str:
    """Return how the message begins that a node was lost, up to the reason."""
    return f"node {node} ({host or f'node{node}'}){WAS_LOST}"


def lost_host(host: str) -> str:
    """Return how the message begins that a host of ``--hosts`` was lost, up to the reason."""
    return f"host {host}{WAS_LOST}"


def killed_launcher(by: str = "SIGKILL") -> str:
    """Return the reason if a signal killed the launcher of a host of ``--hosts``."""
    return f"its launcher was killed by {by}"


def all_running(*hosts: str) -> str:
    """Return the message to a node for which there is no place left."""
    return f"all {len(hosts)} nodes are already running: {', '.join(hosts)}"


def withdrew(host: str) -> str:
    """Return how the message begins that a node withdrew, up to the reason."""
    return f"{host} withdrew before all nodes had joined: "


def command(*args: str | Path) -> list[str]:
    """Return the command that runs meshrun with this interpreter."""
    return [sys.executable, "-m", "meshrun", *map(str, args)]


def run_meshrun(
    *args: str | Path,
    env: dict[str, str] | None = None,
    around: Sequence[str] = (),
    **kwargs: object,
) -> subprocess.CompletedProcess[str]:
    """Run meshrun to its end, with ``around`` as the command's prefix."""
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [*around, *command(*args)],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=_HANG_S,
        check=False,
        **kwargs,
    )


def run_at_startup(folder: Path, code: str) -> dict[str, str]:
    """Return the environment in which each Python process runs ``code`` first."""
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": f"{folder}:{os.environ['PYTHONPATH']}"}


def in_turn(commands: Iterable[Sequence[str]], **env: str) -> list[tuple[int, str, str]]:
    """Run command lines of meshrun in one process; return exit code, stdout and stderr of each."""
    ours = subprocess.run(
        [sys.executable, PROGRAMS / "in_turn.py"], env={**os.environ, **env},
        input=json.dumps(list(commands)), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [(code, out, err) for code, out, err in json.loads(ours.stdout)]


def environments(*args: str, env: dict[str, str] | None = None) -> list[dict[str, str]]:
    """Launch a program that prints its environment; return that of each rank, in order."""
    ours = run_meshrun("--no-prefix", *args, PROGRAMS / "environment.py", env=env)
    assert ours.returncode == 0, ours.stderr
    found = [json.loads(line) for line in ours.stdout.splitlines()]
    return sorted(found, key=lambda env: int(env["RANK"]))


def within(*unshared: str, prepare: str) -> list[str]:
    """Return a prefix that runs a command in new namespaces, after ``prepare``."""
    words = ["unshare", *unshared, "sh", "-c", f'{prepare}; exec "$@"', "sh"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*words, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no namespaces can be created here")
    return words


@contextmanager
def start_meshrun(
    *args: str | Path,
    env: dict[str, str] | None = None,
    folder: Path,
    caller: Path | None = None,
) -> Iterator[Running]:
    """Start meshrun with its output in files in ``folder``; kill it at the end if it still runs.

    With ``caller``, start this Python script instead, with the same arguments.
    """
    with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
        process = subprocess.Popen(
            command(*args) if caller is None else [sys.executable, caller, *args],
            env={**os.environ, **(env or {})},
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    try:
        yield Running(process, folder)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


class Running:
    """A running launch."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self._folder = folder
        self.server: int | None = None
        """The warm server from which the launch's zygote is forked, if any."""

    @property
    def stdout(self) -> str:
        """The output so far."""
        return (self._folder / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """The messages so far."""
        return (self._folder / "stderr").read_text(errors="replace")

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until stdout contains ``text`` at least ``count`` times."""

        def describe() -> str:
            return f"{count} x {text!r} in:\n{self.stdout}\n---\n{self.stderr}"

        def look() -> bool:
            ended = self.process.poll()
            if self.stdout.count(text) >= count:
                return True
            assert ended is None, f"the launch ended with {ended}, without {describe()}"
            return False

        wait_until(look, describe)

    def zygote(self) -> int:
        """Wait for a zygote; return its process id."""
        found: list[int] = []

        def look() -> bool:
            parents = [psutil.Process(self.server or self.process.pid)]
            if self.server is not None:  # a shim is in between
                parents = parents[0].children()
            found[:] = [child.pid for parent in parents for child in parent.children()]
            return bool(found)

        wait_until(look, lambda: "no zygote")
        return found[0]

    def below_zygote(self) -> list[int]:
        """Return the zygote's children in the order they started: the store, then ranks."""
        children = psutil.Process(self.zygote()).children()
        return [child.pid for child in sorted(children, key=lambda child: child.pid)]

    def signal(self, signum: int) -> None:
        """Send a signal to the launcher alone."""
        self.process.send_signal(signum)

    def wait(self) -> int:
        """Wait for the launch to end; return its exit code as a shell shows it."""
        code = self.process.wait(timeout=_HANG_S)
        return 128 - code if code < 0 else code


def wait_until(condition: Callable[[], bool], describe: Callable[[], str]) -> None:
    """Wait until ``condition`` holds; fail after a long time, with the text of ``describe``."""
    deadline = time.monotonic() + _HANG_S
    while True:
        began = time.thread_time()
        if condition():
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"timed out waiting for {describe()}")
        # Polling takes at most a fifth of a core: the awaited processes need the cores.
        time.sleep(max(0.005, 4 * (time.thread_time() - began)))


def wait_for_states(processes: list[psutil.Process], *, stopped: bool) -> None:
    """Wait until all these processes are stopped, or none of them is."""
    wait_until(
        lambda: all((each.status() == psutil.STATUS_STOPPED) == stopped for each in processes),
        lambda: str([each.status() for each in processes]),
    )


def let_pass(seconds: float) -> None:
    """Let time pass, in a test that nothing happens in this time."""
    until = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > until, lambda: "the time to pass")


def is_full(pipe: int) -> bool:
    """Whether a pipe that meshrun has enlarged is full."""
    return (
        fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) > 1 << 16 and not select.select([], [pipe], [], 0)[1]
    )


def ranks_below(launcher: int) -> list[psutil.Process]:
    """Return the ranks: the processes without children, except for the store."""
    below = psutil.Process(launcher).children(recursive=True)
    return [each for each in below if each.name() != "meshrun-guard" and not each.children()]


def has_children() -> bool:
    """Whether this process has children, ended ones included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def marked_processes(mark: str) -> list[str]:
    """Return a line for each live process that has ``mark`` in its environment.

    Tests that start processes do this, so it does without psutil, which takes six times as long.
    """
    found, wanted = [], f"{MARK}={mark}".encode()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            values = _environment(pid)
            if wanted in values or (not values and _is_in_exec(pid)):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                found.append(f"{pid} {words.decode(errors='replace')}")
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


def _environment(pid: str) -> bytes:
    with open(f"/proc/{pid}/environ", "rb") as environment:
        return environment.read()


def _is_in_exec(pid: str) -> bool:
    """Whether a process is in the middle of exec, when it has no visible environment."""
    if Path(f"/proc/{pid}/cmdline").read_bytes():
        return bool(_environment(pid))  # exec is complete; without one, it was started so
    state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    is_kernel_thread = int(numbers[5]) & 0x00200000  # PF_KTHREAD in the kernel's sched.h
    return state not in "ZX" and not is_kernel_thread


def end_marked(mark: str) -> None:
    """Kill the processes that a failed test left behind, so that they do not disturb others."""
    for line in marked_processes(mark):
        os.kill(int(line.split()[0]), signal.SIGKILL)


def lines_of(text: str, labels: Sequence[str]) -> dict[str, list[str]]:
    """Group console lines by their prefix, which must be one of ``labels``."""
    found: dict[str, list[str]] = {label: [] for label in labels}
    for line in text.splitlines():
        label, bracket, rest = line.removeprefix("[").partition("] ")
        if not bracket:
            raise AssertionError(f"a line without a prefix: {line!r}")
        found[label].append(rest)
    return found


def poison(folder: Path) -> None:
    """Fill a folder with modules that shadow those meshrun imports, and record their import."""
    others = ("torch", "rich", "psutil", "msgspec", "numpy", "cloudpickle")
    names = {*sys.stdlib_module_names, *others}
    for name in names - {"__main__", "this", "antigravity"}:
        (folder / f"{name}.py").write_text(
            f"with open({str(folder / 'imported')!r}, 'a') as file:\n"
            f"    print('{name}', open('/proc/self/cmdline').read(), file=file)\n"
        )
    (folder / "meshrun").mkdir()
    (folder / "meshrun" / "__init__.py").write_bytes((folder / "torch.py").read_bytes())
