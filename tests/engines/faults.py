"""Draws a fault from a number: which node it hits, when, and what must follow."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from tests.kit import WAS_LOST, ZYGOTE, lost_node

Phase = Literal["importing", "rendezvous", "joining", "training", "ending", "restarting", "again"]
Fault = Literal["launcher", "zygote", "rank", "host", "cut", "term", "raise"]

PHASES: tuple[Phase, ...] = (
    "importing", "rendezvous", "joining", "training", "ending", "restarting", "again",
)  # fmt: skip
_ANY: tuple[Fault, ...] = ("launcher", "zygote", "host", "cut", "term")
_OF_RANKS: tuple[Fault, ...] = ("rank", "raise")
LOST = 69


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A launch on several hosts and the fault that hits one of them."""

    number: int
    phase: Phase
    fault: Fault
    backend: Literal["static", "c10d"]
    nodes: int
    workers: int
    victim: int
    """The node."""
    local_rank: int

    @property
    def rank(self) -> int:
        """The rank that is hit or held."""
        return self.victim * self.workers + self.local_rank

    @property
    def generation(self) -> int:
        """The generation of ranks in which the fault occurs."""
        return int(self.phase in ("restarting", "again"))

    @property
    def place(self) -> str:
        """Where ranks are held."""
        held = self.phase in ("joining", "training", "ending")
        return self.phase if held else "training"

    @property
    def is_early(self) -> bool:
        """Whether the fault may come before the nodes have joined."""
        return self.phase in ("importing", "rendezvous")

    @property
    def has_launcher(self) -> bool:
        """Whether the victim's launcher survives."""
        return self.fault not in ("launcher", "host")

    @property
    def code(self) -> int:
        """The exit code of every surviving launcher, if the nodes had joined."""
        codes = {"zygote": 137, "rank": 137, "term": 143, "raise": 1}
        return codes.get(self.fault, LOST)

    def cause(self, node: int) -> str:
        """Return how a node's launcher reports the cause, if the nodes had joined."""
        match self.fault:
            case "launcher" | "host":
                return f"error: {lost_node(self.victim)}"
            case "cut":
                return WAS_LOST
            case "zygote":
                what = f"{ZYGOTE} was killed by SIGKILL"
                return f"error: on node{self.victim}, {what}"
            case "rank":
                where = f" on node{self.victim}" if node else ""
                return f"rank {self.rank}{where} was killed by SIGKILL"
            case "raise":
                where = f" on node{self.victim}" if node else ""
                return f"rank {self.rank}{where} raised ValueError: the loss is nan"
            case "term":
                return "stopped by SIGTERM"

    def __str__(self) -> str:
        where = f"node {self.victim} of {self.nodes} x {self.workers}"
        return f"{self.phase}: {self.fault} on {where}, rank {self.rank}, {self.backend}"


def draw(number: int) -> Case:
    """Return the case for a number, always the same; adjacent numbers differ in their phase."""
    dice = random.Random(number)
    phase = PHASES[number % len(PHASES)]
    # In that phase, whether losing a zygote costs a restart depends on timing.
    faults = tuple(each for each in _ANY if phase != "restarting" or each != "zygote")
    has_ranks = phase not in ("importing", "rendezvous", "restarting")
    nodes, workers = dice.choice(((2, 2), (2, 2), (3, 1), (4, 1)))
    if phase == "rendezvous":
        nodes, workers = 3, 1
    last = nodes - (
        2 if phase == "rendezvous" else 1
    )  # at the rendezvous, the last node is not started
    return Case(
        number=number,
        phase=phase,
        fault=dice.choice((*faults, *(_OF_RANKS if has_ranks else ()))),
        backend=dice.choice(("static", "c10d")),
        nodes=nodes,
        workers=workers,
        victim=dice.randint(0, last),
        local_rank=dice.randrange(workers),
    )
