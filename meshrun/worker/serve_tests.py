"""A rank that runs tests: a pytest session that executes what the main session requests.

Like a worker of pytest-xdist, it is a session of its own with the options of the main one. It
collects the same files and so knows the same tests.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import TracebackType
from typing import Any

import pytest
from _pytest.outcomes import Exit
from msgspec import Struct

from meshrun.host import rank_variables as var
from meshrun.layout.labels import rank_label
from meshrun.mesh.current_layout import current_layout
from meshrun.wording import count
from meshrun.worker.call_channel import CallBegun, Channel, TimeLimit
from meshrun.worker.debuggers import RankTerminal
from meshrun.worker.group_lifetime import THREAD

NAME = "meshrun-rank"
"""The name of the plug-in that only ranks have."""
_THREADS_END_S, _LOOK_AGAIN_S = 0.5, 0.01
"""How long a thread may take to end after its test, and how often to check."""
RETRIES = "pytest-retry"
"""A plug-in that is blocked on ranks: it runs a test again while a report on it is made."""


class BeginSession(Struct, frozen=True):
    """From the main session: what a rank needs for a session of its own."""

    args: list[str]
    options: dict[str, Any]
    workerinput: dict[str, Any]
    """What plug-ins of the main session pass to a worker of pytest-xdist."""
    markers: list[str]
    """The marks that plug-ins of the main session have registered."""
    paths: list[str]
    """The files whose tests run on ranks."""
    debugs: bool
    """Whether the first rank that fails a test is to be debugged (``--pdb``)."""


class RunTest(Struct, frozen=True):
    """A test to run, and the next one on these ranks, for which fixtures are kept."""

    nodeid: str
    next_nodeid: str | None


class TestDone(Struct):
    """The result of a test."""

    reports: list[dict[str, Any]] = []
    warnings: list[tuple[Any, str, str, Any]] = []
    """(message, when, test, place) of each."""
    text: str = ""
    """Why there are no reports."""
    exit: Exit | None = None
    """The exception by which it ended the session, if it did."""
    is_last: bool = False
    """Whether no other test can run on these ranks, because it destroyed their process group."""

    __test__ = False  # not a test, despite its name

    @property
    def has_failed(self) -> bool:
        """Whether the other ranks may wait for this one forever."""
        return bool(self.text) or self.exit is not None or any(map(is_failure, self.reports))


def is_failure(report: Mapping[str, Any]) -> bool:
    """Return whether a test failed, as expected or not; passing a strict xfail does not count."""
    if report.get("outcome") == "failed":
        return not str(report.get("longrepr")).startswith("[XPASS(strict)]")
    return report.get("outcome") == "skipped" and "wasxfail" in report


def serve(channel: Channel) -> None:
    """Run a session until no more tests are requested."""
    from _pytest.config import Config

    try:
        begin: BeginSession = channel.receive()
        channel.send(CallBegun())
    except (EOFError, OSError):  # the main session is gone
        return
    temporary = os.path.join(begin.options["basetemp"], f"rank{var.own_rank()}")
    # The main session has a terminal reporter, and meshrun has its own faulthandler.
    without = ("no:terminal", "no:faulthandler")
    own = {
        "plugins": [*begin.options.get("plugins", ()), *without],
        "basetemp": temporary,
    }
    config = Config.fromdictargs({**begin.options, **own}, begin.args)
    config.args = begin.args
    # This tells plug-ins that another process writes the reports. It includes all options because
    # some plug-ins pass them to workers only with pytest-xdist, as pytest-randomly its seed.
    worker = {"workerid": f"rank{var.own_rank()}"}
    config.workerinput = {**begin.options, **begin.workerinput, **worker}  # type: ignore[attr-defined]
    config.pluginmanager.set_blocked(RETRIES)
    for marker in begin.markers:
        config.addinivalue_line("markers", marker)
    config.pluginmanager.register(_RankSession(channel, begin, config), NAME)
    config.hook.pytest_cmdline_main(config=config)


def plugins_that_run_tests(item: pytest.Item) -> Iterator[object]:
    """Yield the plug-ins with their own way to run a test, such as running it repeatedly.

    A ``conftest.py`` only prepares tests in this hook, so it is left to the ranks.
    """
    for each in item.ihook.pytest_runtest_protocol.get_hookimpls():
        is_wrapper = each.hookwrapper or getattr(each, "wrapper", False)  # since pluggy 1.2
        if not is_wrapper and os.path.basename(each.plugin_name) != "conftest.py":
            yield each.plugin


class _RankSession:
    """Replaces pytest's loop over all tests by one over requests."""

    def __init__(self, channel: Channel, begin: BeginSession, config: pytest.Config) -> None:
        self._channel, self._begin, self._config = channel, begin, config
        self._terminal = RankTerminal(channel)
        self._items: dict[str, pytest.Item] = {}
        self._done = TestDone()
        self._broken: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        """Collect only the files whose tests run on ranks."""
        for item in session.perform_collect(self._begin.paths):
            self._items[item.nodeid] = item
        return True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember why a file could not be collected."""
        if report.failed:
            self._broken.append(str(report.longrepr))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> bool:
        """Run the tests that the main session requests."""
        while True:
            try:
                self._channel.send(self._done)
                order: RunTest = self._channel.receive()
                self._channel.send(CallBegun())
            except (EOFError, OSError):  # the main session is gone
                return True
            self._done = TestDone()
            self._run(order)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store the report on a phase of a test."""
        # In this hook, pytest fails a test whose subtests have failed.
        self._config.hook.pytest_report_teststatus(report=report, config=self._config)
        to_data = self._config.hook.pytest_report_to_serializable
        self._done.reports.append(to_data(config=self._config, report=report))

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, settings: Any) -> bool:
        """Have the main session enforce the limit of pytest-timeout, for all ranks."""
        return self._limit_time(settings.timeout)

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_cancel_timer(self) -> bool:
        """Have the main session drop the limit."""
        return self._limit_time(None)

    def _limit_time(self, seconds: float | None) -> bool:
        if not self._terminal.is_held:  # while it is, its owner reads nothing else
            self._channel.send(TimeLimit(seconds))
        return True

    def pytest_exception_interact(self, call: pytest.CallInfo[Any], report: object) -> None:
        """Debug a test that fails, if this is the first rank that it fails on."""
        if not (self._begin.debugs and isinstance(report, pytest.TestReport) and call.excinfo):
            return
        with without_capture(self._config):
            if self._terminal.acquire():
                self._terminal.quits = _debug(self._config, report, call.excinfo.tb)
                self._terminal.release()

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        """Store a warning for the main session."""
        kept = warnings.WarningMessage(
            warning_message.message,
            warning_message.category,
            warning_message.filename,
            warning_message.lineno,
        )
        try:
            pickle.dumps(kept)
        except Exception:  # such as a class defined in a function
            text = str(warning_message.message)
            kept = warnings.WarningMessage(text, UserWarning, kept.filename, kept.lineno)
        self._done.warnings.append((kept, when, nodeid, location))

    def _run(self, order: RunTest) -> None:
        own = os.getpid()
        item = self._items.get(order.nodeid)
        if item is None:
            found = "\n".join(self._broken) or count(len(self._items), "other test")
            self._done.text = f"a rank has no test `{order.nodeid}`; it found:\n{found}"
            return
        following = self._items.get(order.next_nodeid or "")
        before = _Resources()
        plug_ins = self._config.pluginmanager
        # Repetitions are the main session's decision, for all ranks together.
        others = {*plugins_that_run_tests(item)} - {plug_ins.get_plugin("runner")}
        run_once = plug_ins.subset_hook_caller("pytest_runtest_protocol", others)
        try:
            run_once(item=item, nextitem=following)
        except Exit as error:
            self._done.exit = error
        except BaseException as error:  # such as an interrupt
            self._done.text = f"{type(error).__name__}: {error}"
        if os.getpid() != own:  # a child that the test forked and that returned from the test
            os._exit(0)
        if self._terminal.is_held:  # for a breakpoint
            with without_capture(self._config):
                self._terminal.release()
        if left := ", ".join(before.left_behind()):
            self._warn(item, f"the test left behind {left}")
        if before.lost_its_group():
            self._done.is_last = True
            self._warn(item, "the test destroyed the process group; later tests get new ranks")

    def _warn(self, item: pytest.Item, text: str) -> None:
        place = (str(item.path), (item.location[1] or 0) + 1, item.name)
        message = pytest.PytestWarning(text)
        warning = warnings.WarningMessage(message, pytest.PytestWarning, place[0], place[1])
        self._done.warnings.append((warning, "runtest", item.nodeid, place))


class _Resources:
    """Resources of a rank that a test should release."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._world = _world()
        self._groups = _count_groups()
        self._cuda_bytes = _cuda_bytes()

    def lost_its_group(self) -> bool:
        """Return whether the default process group, which the mesh uses, was destroyed."""
        return self._world is not None and _world() is not self._world

    def left_behind(self) -> Iterator[str]:
        """Yield a description of each resource that was not released."""
        until_s = time.monotonic() + _THREADS_END_S
        while (threads := self._new_threads()) and time.monotonic() < until_s:
            time.sleep(_LOOK_AGAIN_S)  # join() may be overridden and end the thread
        if threads:
            yield f"{count(len(threads), 'thread')} ({', '.join(threads)})"
        if (groups := _count_groups() - self._groups) > 0:
            yield count(groups, "process group")
        if (more := _cuda_bytes() - self._cuda_bytes) > 0:
            yield f"{more / 2**20:.1f} MiB on its GPU"

    def _new_threads(self) -> list[str]:
        new = (each for each in threading.enumerate() if each not in self._threads)
        return [each.name for each in new if each.name != THREAD]


def _world() -> object:
    import torch.distributed as dist

    return dist.group.WORLD if dist.is_available() else None


def _count_groups() -> int:
    import torch.distributed as dist

    return len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0


def _cuda_bytes() -> int:
    import torch

    return torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0


@contextmanager
def without_capture(config: pytest.Config) -> Iterator[None]:
    """Use this process's own standard streams while the block runs."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        yield
        return
    capture.suspend(in_=True)
    try:
        yield
    finally:
        capture.resume()


def _debug(config: pytest.Config, report: pytest.TestReport, frames: TracebackType) -> bool:
    """Show a failure and debug it on standard streams; return whether the user quit."""
    from _pytest.config import create_terminal_writer

    to = create_terminal_writer(config, sys.stdout)
    to.line()
    for name, text in report.sections:
        to.sep(">", name)
        to.line(text.rstrip())
    to.sep(">", "traceback")
    report.toterminal(to)
    rank = var.own_rank()
    to.sep(">", f"entering PDB on rank {rank} [{rank_label(current_layout(), rank)}]")
    module, name = config.getoption("usepdb_cls") or ("pdb", "Pdb")
    debugger = getattr(import_module(module), name)()
    config.hook.pytest_enter_pdb(config=config, pdb=debugger)
    debugger.reset()
    debugger.interaction(None, frames)
    config.hook.pytest_leave_pdb(config=config, pdb=debugger)
    return bool(debugger.quitting)
