"""What has to come of a case, by the documented exit codes."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from tests.chaos.drawing import Case

_DEADLY = (signal.SIGKILL, signal.SIGSEGV)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """How a launch ends."""

    codes: frozenset[int]
    says: tuple[str, ...] = ()
    """Each is in what meshrun said, or what stands between ``|`` in it."""
    all_lines: bool = True
    """Whether every line is printed; those in files are there anyway."""
    is_done: bool = False
    """Whether it goes on to its own end."""


def expect(case: Case) -> Expected:
    """Return what has to come of ``case``."""
    match case.fault:
        case "signal":
            return _of_signal(case)
        case "ctrl_c":
            once = case.times == 1
            says = ("stopped by Ctrl-C, SIGINT",) if once or case.deaf else ()
            return _ended(130, *says, all_lines=once)
        case "hang_up":
            says = () if case.on_terminal else ("stopped by SIGHUP",)
            return _ended(129, *says, all_lines=not case.on_terminal)
        case "reader":
            return _ended(141, "stopped by the reader of the output went away", all_lines=False)
        case "disk":
            full = r"raised OSError: [Errno 28] No space left|could not be made: No space left"
            return Expected(codes=frozenset({1, 71}), says=(full,), all_lines=False)
        case "inodes":
            return Expected(codes=frozenset({0, 2, 71}), all_lines=False)
        case "descriptors":
            if case.room >= 4 * case.ranks + 64:
                return _done(case)
            return _ended(71, "the limit is |Too many open files")


def _ended(code: int, *says: str, all_lines: bool = True) -> Expected:
    return Expected(codes=frozenset({code}), says=says, all_lines=all_lines)


def _done(case: Case, *says: str) -> Expected:
    """It goes well; what ranks started and left is ended."""
    more = ("that ranks had left behind had to be ended",) if case.children else ()
    if case.phase == "again":
        more += (f"restart 1 of 1, because {_rank(case, case.ranks - 1)} exited with code 3",)
    return Expected(codes=frozenset({0}), says=(*says, *more), is_done=True)


def _of_signal(case: Case) -> Expected:
    name, code = case.signum.name, 128 + case.signum
    if case.signum == signal.SIGSTOP:
        return _of_stop(case)
    deadly = case.signum in _DEADLY
    match case.victim:
        case "launcher":
            says = () if deadly else (f"stopped by {name}",)
            return _ended(code, *says, all_lines=not deadly)
        case "zygote":
            if deadly:
                return _ended(code, f"the process that starts the ranks was ended by {name}")
        case "store":
            if deadly:
                return _failed(case, 71, f"that holds the ranks' store was ended by {name}")
        case "rank":
            if deadly or not (case.deaf and case.phase != "joining"):
                rank = _rank(case, case.victim_rank)
                return _failed(case, code, f"{rank} was ended by {name}")
        case "child":
            if case.watch and (deadly or not case.deaf):
                return _failed(case, 1, "raised RuntimeError: a worker died")
    return _done(case)


def _failed(case: Case, code: int, says: str) -> Expected:
    """A generation of ranks failed; there may be another."""
    if case.restarts > case.generation:
        says = "the ranks' store ended" if "store" in says else says
        return Expected(codes=frozenset({0}), says=("restart 1 of 1, because", says), is_done=True)
    return _ended(code, says)


def _of_stop(case: Case) -> Expected:
    if case.then == "stop":
        return _ended(143, "stopped by SIGTERM")
    if case.then == "kill":
        return _ended(137, all_lines=False)
    return _done(case)


def _rank(case: Case, rank: int) -> str:
    labels = {
        1: f"dp{rank}",
        2: f"tp{rank}",
        4: f"dp{rank // 2} tp{rank % 2}",
    }
    return f"rank {rank} [{labels[case.ranks]}]" if case.has_mesh else f"rank {rank}"
