"""The required outcome of a case, by the documented exit codes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos.drawing import Case, Fault
from tests.kit import LEFT_BEHIND, STORE, ZYGOTE


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """How a launch must end."""

    codes: frozenset[int]
    messages: tuple[str, ...] = ()
    """Texts that stderr must contain; ``|`` separates alternatives."""
    all_lines: bool = True
    """Whether every line must be printed; files must have them in any case."""
    is_done: bool = False
    """Whether the launch runs to completion."""
    restarts: bool = False
    """Whether it does so in a new generation."""


def expect(case: Case) -> Expected:
    """Return the required outcome of ``case``."""
    return _BY_FAULT[case.fault](case)


def _of_ctrl_c(case: Case) -> Expected:
    once = case.times == 1
    return _ended(130, *(["stopped by Ctrl-C, SIGINT"] if once else []), all_lines=once)


def _of_hang_up(case: Case) -> Expected:
    messages = () if case.on_terminal else ("stopped by SIGHUP",)
    return _ended(129, *messages, all_lines=not case.on_terminal)


def _of_lost_reader(case: Case) -> Expected:
    return _ended(141, "stopped by a closed output pipe", all_lines=False)


def _of_full_disk(case: Case) -> Expected:
    message = "raised OSError: [Errno 28] No space left|`: No space left"
    return Expected(codes=frozenset({1, 71}), messages=(message,), all_lines=False)


def _of_few_inodes(case: Case) -> Expected:
    """How many inodes suffice depends on the file system, so success is allowed too."""
    return Expected(codes=frozenset({0, 2, 71}), all_lines=False)


def _of_few_descriptors(case: Case) -> Expected:
    if case.room >= 5 * case.ranks + 90:
        return _done(case)
    return _ended(71, "the limit is |Too many open files")


def _ended(code: int, *messages: str, all_lines: bool = True) -> Expected:
    return Expected(codes=frozenset({code}), messages=messages, all_lines=all_lines)


def _done(case: Case, *messages: str) -> Expected:
    """The launch succeeds, and processes that ranks left behind are killed."""
    more = (LEFT_BEHIND,) if case.children else ()
    if case.phase == "again":
        more += (f"restart 1 of 1, because {_rank(case, case.ranks - 1)} exited with code 3",)
    return Expected(codes=frozenset({0}), messages=(*messages, *more), is_done=True)


def _of_signal(case: Case) -> Expected:  # noqa: PLR0911 - one for each victim
    name, code = case.signum.name, 128 + case.signum
    if case.signum == signal.SIGSTOP:
        return _of_stop(case)
    deadly = case.signum != signal.SIGTERM
    heeds = deadly or not case.deaf or case.phase == "joining"
    rank = _rank(case, case.victim_rank)
    match case.victim:
        case "both":
            return _ended(code, all_lines=False)
        case "launcher":
            messages = () if deadly else (f"stopped by {name}",)
            return _ended(code, *messages, all_lines=not deadly)
        case "zygote" if deadly and case.phase == "clearing":  # a rank failed, a restart is left
            failing = _rank(case, case.ranks - 1)
            why = f"restart 1 of 1, because {failing} exited with code 3"
            return Expected(codes=frozenset({0}), messages=(why,), is_done=True, restarts=True)
        case "zygote" if deadly:
            return _failed(case, code, f"{ZYGOTE} was killed by {name}")
        case "store" if deadly:
            return _failed(case, 71, f"{STORE} was killed by {name}")
        case "rank" if heeds:
            return _failed(case, code, f"{rank} was killed by {name}")
        case "child" if heeds and case.watch:
            return _failed(case, 1, f"{rank} raised RuntimeError: a worker died")
        case _:
            return _done(case)


def _failed(case: Case, code: int, cause: str) -> Expected:
    """A generation fails; another follows if a restart is left."""
    if case.restarts > case.generation:
        why = f"restart 1 of 1, because {cause}"
        return Expected(codes=frozenset({0}), messages=(why,), is_done=True, restarts=True)
    return _ended(code, cause)


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


_BY_FAULT: dict[Fault, Callable[[Case], Expected]] = {
    "signal": _of_signal,
    "ctrl_c": _of_ctrl_c,
    "hang_up": _of_hang_up,
    "reader": _of_lost_reader,
    "disk": _of_full_disk,
    "inodes": _of_few_inodes,
    "descriptors": _of_few_descriptors,
}
