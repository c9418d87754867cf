"""The state of a launch: State and its parts. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from meshrun.lifecycle.phases import Gate, Link, NodesPhase, Phase, Stop
from meshrun.protocol.events import (
    GenerationAborted,
    Hung,
    LaunchOver,
    MeetingFailed,
    NodeLost,
    ZygoteGone,
)
from meshrun.protocol.from_zygote import (
    Checked,
    NodeExcluded,
    ProgramBroken,
    StartFailed,
    StoreEnded,
)
from meshrun.protocol.generation import Cause, NodeOutcome, RankState


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesState:
    """The other nodes of a launch, as this one's launcher knows them."""

    phase: NodesPhase = NodesPhase.MEETING
    link: Link = Link.UP
    failed: MeetingFailed | None = None
    lost: NodeLost | None = None
    """The first node that was lost."""
    signum: int | None = None
    """The signal that ended ranks of another node, and therefore here too."""
    is_coordinator: bool = False
    is_elastic: bool = False
    """Whether nodes may come and go."""
    change: GenerationAborted | None = None
    """The first node that came or went in this generation; known to the coordinator."""
    over: LaunchOver | None = None
    ranks: dict[int, RankState] = field(default_factory=dict)
    """Ranks of other nodes that failed, or left first; at the coordinator, once nothing is left."""
    outcomes: tuple[NodeOutcome, ...] = ()
    """What else the others reported of this generation."""

    @property
    def for_next_generation(self) -> NodesState:
        """What is known as the next generation of ranks begins."""
        return NodesState(
            phase=NodesPhase.RUNNING,
            is_coordinator=self.is_coordinator,
            is_elastic=self.is_elastic,
        )

    @property
    def is_met(self) -> bool:
        """Whether all nodes have been there."""
        return self.phase is not NodesPhase.MEETING

    @property
    def is_idle(self) -> bool:
        """Whether the coordinator knows that nothing is left here of this generation."""
        return self.phase not in (NodesPhase.MEETING, NodesPhase.RUNNING)

    @property
    def may_end_alone(self) -> bool:
        """Whether a node that is idle may end before the others have."""
        return self.is_elastic or self.phase is NodesPhase.REGROUPING

    @property
    def may_leave(self) -> bool:
        """Whether the others can continue without this node, and are not being stopped too."""
        is_needed = self.is_coordinator or self.is_idle or self.signum is not None
        return self.is_elastic and self.awaits_decision and not is_needed

    @property
    def awaits_decision(self) -> bool:
        """Whether the coordinator is still to say what comes next."""
        is_open = self.phase not in (NodesPhase.MEETING, NodesPhase.OVER)
        return is_open and self.link is not Link.CUT_OFF


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A launch at one moment."""

    shutdown_timeout_s: float
    ranks: dict[int, RankState]
    """This generation's."""
    phase: Phase = Phase.IMPORTING
    stop: Stop = Stop.NONE
    max_restarts: int = 0
    causes: tuple[Cause, ...] = ()
    """Why each generation before this one ended."""
    no_restart: str | None = None
    """Why ranks are not restarted although restarts are left, if that is so."""
    deadline_ns: int | None = None
    sigterm_repeats: bool = False
    """Whether only the first SIGTERM counts."""
    signals: tuple[int, ...] = ()
    """Signals the launcher was sent, in order."""
    why_signalled: str = ""
    """Why, if the parent of the launcher sent the first."""
    broken: ProgramBroken | None = None
    start_error: StartFailed | None = None
    lost_process: StoreEnded | ZygoteGone | None = None
    """Which process of meshrun's own ended, if that is what ended this generation."""
    gate: Gate = Gate.SHUT
    """Whether ranks that have finished may leave."""
    begin_ns: int | None = None
    """When this generation is to start, while that is waited for."""
    hung: Hung | None = None
    """Set once no rank made progress for too long."""
    excluded: NodeExcluded | None = None
    """Set once a rank of this node reported that the node must not be used."""
    failed_check: Checked | None = None
    """Set once the check before the program found what ends the launch."""
    step: int | None = None
    """How far a rank of this node has come, if one says."""
    zygote_gone: ZygoteGone | None = None
    """Set until there is another one."""
    nodes: NodesState | None = None
    """The other nodes, if there are any."""
    alive: frozenset[int] = field(default_factory=frozenset)
    """Ranks that were started and have not ended."""

    @property
    def stopping(self) -> bool:
        """Whether the ranks were told to end."""
        return self.stop is not Stop.NONE

    @property
    def killed(self) -> bool:
        """Whether SIGKILL has been sent to the ranks."""
        return self.stop is Stop.KILLED

    @property
    def generation(self) -> int:
        """How often the ranks were restarted."""
        return len(self.causes)

    @property
    def restarts(self) -> int:
        """How often that was for a failure."""
        return sum(cause.is_failure for cause in self.causes)

    @property
    def over(self) -> bool:
        """Whether nothing is left to wait for."""
        return self.phase is Phase.OVER

    @property
    def has_killed(self) -> bool:
        """Whether SIGKILL has been sent to the ranks of any node."""
        told = self.nodes.outcomes if self.nodes is not None else ()
        return self.killed or any(outcome.killed for outcome in told)

    @property
    def best_step(self) -> int | None:
        """How far a rank of any node has come; other nodes report it once nothing is left."""
        told = self.nodes.outcomes if self.nodes is not None else ()
        return furthest(self.step, *(outcome.step for outcome in told))

    @property
    def all_ranks(self) -> dict[int, RankState]:
        """What is known of ranks on all nodes; of the others' only those that matter."""
        return {**self.nodes.ranks, **self.ranks} if self.nodes is not None else self.ranks


def skip_time(state: State, lost_ns: int) -> State:
    """Return the state in which nothing is due any sooner for time in which nobody could act."""
    return replace(
        state,
        deadline_ns=None if state.deadline_ns is None else state.deadline_ns + lost_ns,
        begin_ns=None if state.begin_ns is None else state.begin_ns + lost_ns,
    )


def was_stopped(state: State) -> bool:
    """Whether a signal asked the launch to stop, here or on another node."""
    nodes = state.nodes
    if nodes is None or state.signals:
        return bool(state.signals)
    return nodes.signum is not None or (nodes.over is not None and bool(nodes.over.signum))


def furthest(*steps: int | None) -> int | None:
    """Return the last of some steps, ``None`` if there is none."""
    return max((step for step in steps if step is not None), default=None)


def has_no_rank_left(state: State) -> bool:
    """Whether no rank is left and no other will be started."""
    if state.alive or state.phase in (Phase.CLEARING, Phase.ENDING, Phase.OVER):
        return False
    return state.stopping or all(rank.exited is not None for rank in state.ranks.values())
