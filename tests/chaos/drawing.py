"""Draws a case from a number: a launch, a fault and a moment."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from typing import Literal

Fault = Literal["signal", "ctrl_c", "hang_up", "reader", "disk", "inodes", "descriptors"]
Phase = Literal["importing", "joining", "training", "ending", "clearing", "again", "all"]
Victim = Literal["launcher", "zygote", "both", "store", "rank", "child", "session"]
Then = Literal["release", "continue", "stop", "kill"]
Output = Literal["console", "tee", "redirect"]

FAULTS: tuple[Fault, ...] = (
    *("signal",) * 14, "ctrl_c", "ctrl_c", "hang_up", "reader", "disk", "inodes", "descriptors",
)  # fmt: skip
_VICTIMS: dict[Phase, tuple[Victim, ...]] = {
    "importing": ("launcher", "zygote"),
    "joining": ("launcher", "zygote", "both", "store", "rank", "rank"),
    "training": ("launcher", "zygote", "both", "store", "rank", "rank", "child", "session"),
    "ending": ("launcher", "zygote", "both", "store", "rank", "rank", "child"),
    "clearing": ("launcher", "zygote"),
    "again": ("launcher", "zygote", "both", "store", "rank", "rank", "child", "session"),
}
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGSEGV)
MESHES = {1: "dp=1", 2: "tp=2", 4: "dp=2,tp=2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One launch and the fault that hits it."""

    number: int
    fault: Fault
    phase: Phase
    ranks: int
    has_mesh: bool
    real_torch: bool
    method: Literal["fork", "exec"]
    output: Output
    deaf: bool
    children: bool
    restarts: int
    victim: Victim = "launcher"
    victim_rank: int = 0
    signum: signal.Signals = signal.SIGKILL
    then: Then = "release"
    """What follows SIGSTOP: the other ranks go on, the victim goes on, or the launcher is ended."""
    watch: bool = False
    """Whether ranks raise an exception when their forked child ends."""
    times: int = 1
    """How many times Ctrl-C is pressed."""
    on_terminal: bool = False
    room: int = 0
    """How many bytes, files or descriptors are available."""

    @property
    def generation(self) -> int:
        """The generation of ranks in which the fault occurs."""
        return int(self.phase == "again")

    @property
    def place(self) -> str:
        """Where the ranks of that generation are held."""
        return "training" if self.phase == "again" else self.phase

    @property
    def failing_rank(self) -> int | None:
        """The rank that fails in the first generation, to cause a second one."""
        return self.ranks - 1 if self.phase in ("again", "clearing") else None

    @property
    def is_warm(self) -> bool:
        """Whether the zygote comes from a warm server, which has done the imports."""
        may_be = self.method == "fork" and not self.real_torch and self.phase != "importing"
        is_drawn = random.Random(-self.number).random() < 0.35
        return may_be and is_drawn and self.fault not in ("disk", "inodes", "descriptors")

    def __str__(self) -> str:
        shown = {
            "signal": f"{self.signum.name} to {self.victim}",
            "ctrl_c": f"{self.times} x ctrl-c",
        }
        words = [shown.get(self.fault, self.fault), self.phase, f"{self.ranks} ranks", self.output]
        flags = ("has_mesh", "real_torch", "deaf", "children", "restarts", "watch", "on_terminal",
                 "is_warm")  # fmt: skip
        words += [flag for flag in flags if getattr(self, flag)]
        if self.signum == signal.SIGSTOP and self.fault == "signal":
            words.append(f"then {self.then}")
        return ", ".join([*words, *(["exec"] if self.method == "exec" else [])])


def draw(number: int) -> Case:
    """Return the case for a number, always the same."""
    dice = random.Random(number)
    fault = FAULTS[number % len(FAULTS)]
    real_torch = fault in ("signal", "ctrl_c", "hang_up") and dice.random() < 0.08
    method: Literal["fork", "exec"] = "exec" if dice.random() < 0.1 and not real_torch else "fork"
    phase = _draw_phase(dice, fault, real_torch or method == "exec")
    victim = dice.choice(_VICTIMS.get(phase, ("launcher",)))
    ranks = dice.choice((1, 2, 4))
    signum = dice.choice(_SIGNALS) if victim != "both" else signal.SIGKILL
    then: Then = "release"
    if fault == "signal" and signum == signal.SIGSTOP and victim in ("launcher", "zygote", "rank"):
        then = dice.choice(("continue", "continue", "stop", "kill"))
    children = victim in ("child", "session", "both") or dice.random() < 0.3
    has_mesh = dice.random() < 0.5 or real_torch
    fresh = phase in ("joining", "training", "ending") and fault == "signal"
    return Case(
        number=number,
        fault=fault,
        phase=phase,
        ranks=ranks,
        has_mesh=has_mesh,
        real_torch=real_torch,
        method=method,
        output=dice.choice(("console", "console", "tee", "redirect"))
        if fault not in ("disk", "inodes", "reader")
        else "console"
        if fault == "reader"
        else dice.choice(("tee", "redirect")),
        # Deaf ranks would use up the shutdown timeout of what they leave behind.
        deaf=dice.random() < 0.25 and phase != "clearing",
        children=children and fault != "disk",
        restarts=1 if phase in ("clearing", "again") else int(fresh and dice.random() < 0.3),
        victim=victim,
        victim_rank=dice.randrange(ranks),
        signum=signum,
        then=then,
        watch=victim == "child" and phase in ("training", "again") and dice.random() < 0.6,
        times=dice.choice((1, 2, 3)),
        on_terminal=fault == "hang_up" and phase != "clearing" and dice.random() < 0.5,
        room=_draw_room(dice, fault, ranks),
    )


def _draw_phase(dice: random.Random, fault: Fault, late: bool) -> Phase:
    if fault in ("disk", "inodes", "descriptors"):
        return "all"
    if fault == "reader":
        return dice.choice(("training", "again"))
    if late:
        return dice.choice(("training", "ending", "again"))
    phases: list[Phase] = ["importing", "joining", "training", "ending", "again"]
    return dice.choice([*phases, *phases[1:], "training", "clearing"])


def _draw_room(dice: random.Random, fault: Fault, ranks: int) -> int:
    if fault == "disk":
        return 1024 * dice.choice((8, 32, 100))
    if fault == "inodes":
        return dice.randint(1, 4 + 4 * ranks)
    return dice.choice((10, 16, 24, 40, 5 * ranks + 50, 5 * ranks + 60, 5 * ranks + 90))
