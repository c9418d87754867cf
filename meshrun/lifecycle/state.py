"""The state of a launch: State and its parts. Pure."""

from __future__ import annotations

from itertools import chain
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from meshrun.lifecycle.actions import Action
from meshrun.lifecycle.phases import ExitBarrier, Link, NodesPhase, Phase, Stop
from meshrun.protocol.events import (
    GenerationAborted,
    Hung,
    JoinFailed,
    LaunchOver,
    NodeLost,
    ZygoteGone,
)
from meshrun.protocol.generation import Cause, NodeOutcome, RankState
from meshrun.protocol.zygote_messages import (
    Checked,
    NodeExcluded,
    ProgramBroken,
    StartFailed,
    StoreEnded,
)


class NodesPolicy(Struct, frozen=True, kw_only=True):
    """What a change of the nodes means to a launch: :data:`FIXED` or :data:`ELASTIC`.

    Nothing else in this package asks which of the two a launch is.
    """

    needs_all: bool
    """Whether the launch needs every one of its nodes, not only node 0."""
    loss_is_failure: bool
    """Whether a generation that a change of the nodes has ended needs a restart to be followed."""
    returns: bool
    """Whether a node that has lost the coordinator ends its ranks and reconnects."""


FIXED = NodesPolicy(needs_all=True, loss_is_failure=True, returns=False)
ELASTIC = NodesPolicy(needs_all=False, loss_is_failure=False, returns=True)


class NodesState(Struct, frozen=True, kw_only=True):
    """What this launcher knows of the other nodes, if there are any."""

    phase: NodesPhase = NodesPhase.JOINING
    link: Link = Link.UP
    failed: JoinFailed | None = None
    lost: NodeLost | None = None
    """The first lost node."""
    signum: int | None = None
    """The signal that stopped another node, and so this one."""
    is_coordinator: bool = False
    """Whether the ranks' store is here, and the decision what comes next."""
    policy: NodesPolicy = FIXED
    change: GenerationAborted | None = None
    """The first change of the nodes in this generation; only the coordinator knows it."""
    launch_over: LaunchOver | None = None
    """What the coordinator announced, in the phase ``OVER``."""
    outcomes: tuple[NodeOutcome, ...] = ()
    """The other nodes' reports on this generation; the coordinator has them once every node is
    cleared."""

    @property
    def is_alone(self) -> bool:
        """Whether there are no other nodes."""
        return self.phase is NodesPhase.ALONE

    @property
    def have_joined(self) -> bool:
        """Whether there are other nodes, and all have joined once."""
        return self.phase not in (NodesPhase.JOINING, NodesPhase.ALONE)

    @property
    def is_cleared(self) -> bool:
        """Whether this node has reported that nothing of this generation is left on it."""
        return self.have_joined and self.phase is not NodesPhase.RUNNING

    @property
    def may_end_alone(self) -> bool:
        """Whether a cleared node may exit before the others."""
        return not self.policy.needs_all or self.phase is NodesPhase.AWAITING_NODES

    @property
    def may_leave(self) -> bool:
        """Whether the others can continue without this node and are not being stopped."""
        is_needed = self.is_coordinator or self.is_cleared or self.signum is not None
        return not self.policy.needs_all and self.awaits_decision and not is_needed

    @property
    def may_return(self) -> bool:
        """Whether this node is to reconnect if it loses the coordinator."""
        return self.policy.returns and self.link is not Link.CLOSED and self.signum is None

    @property
    def awaits_decision(self) -> bool:
        """Whether the coordinator has yet to decide what comes next."""
        is_open = self.have_joined and self.phase is not NodesPhase.OVER
        return is_open and self.link is not Link.CLOSED


ALONE = NodesState(phase=NodesPhase.ALONE, is_coordinator=True)


class State(Struct, frozen=True, kw_only=True):
    """A launch at one moment."""

    shutdown_timeout_s: float
    ranks: dict[int, RankState]
    """The ranks of this node in this generation."""
    phase: Phase = Phase.IMPORTING
    stop: Stop = Stop.NONE
    max_restarts: int = 0
    causes: tuple[Cause, ...] = ()
    """Why each generation before this one ended."""
    no_restart: str | None = None
    """Why the ranks are not restarted although restarts are left."""
    deadline_ns: int | None = None
    """When to be stricter: to stop ranks, to kill them, or to kill the zygote that ends them."""
    sigterm_repeats: bool = False
    """Whether only the first SIGTERM counts."""
    signals: tuple[int, ...] = ()
    """Signals that the launcher received, in order."""
    why_signalled: str = ""
    """The reason, if the launcher's parent sent the first signal."""
    broken: ProgramBroken | None = None
    start_error: StartFailed | None = None
    lost_process: StoreEnded | ZygoteGone | None = None
    """The process of meshrun's own whose end ended this generation."""
    exit_barrier: ExitBarrier = ExitBarrier.CLOSED
    """Whether finished ranks may exit."""
    begin_ns: int | None = None
    """When this generation will start, during a back-off."""
    hung: Hung | None = None
    """Set once no rank has made progress for too long."""
    excluded: NodeExcluded | None = None
    """Set once a rank of this node has reported that the node must not be used."""
    failed_check: Checked | None = None
    """Set once the check before the program has found a reason to end the launch."""
    step: int | None = None
    """The furthest step that a rank of this node has reported."""
    zygote_gone: ZygoteGone | None = None
    """Set from the end of the zygote until the start of another one."""
    nodes: NodesState = ALONE
    actions: tuple[Action, ...] = ()
    """What follows from the event that is being handled, in order."""

    def do(self, *actions: Action) -> State:
        """Return the state with further actions to carry out."""
        return replace(self, actions=(*self.actions, *actions))

    def with_nodes(self, **changes: Any) -> State:
        """Return the state after changes of what is known of the other nodes."""
        return replace(self, nodes=replace(self.nodes, **changes))

    @property
    def wake_ns(self) -> int | None:
        """When TimePassed is due, or ``None``."""
        if self.over:
            return None
        return self.deadline_ns if self.begin_ns is None or self.stopping else self.begin_ns

    @property
    def alive(self) -> dict[int, int]:
        """The process ids of the ranks that have started and not exited."""
        if self.zygote_gone is not None:  # and every rank with it
            return {}
        return {
            rank: rank_state.pid
            for rank, rank_state in self.ranks.items()
            if rank_state.pid is not None and rank_state.exited is None
        }

    @property
    def stopping(self) -> bool:
        """Whether the ranks were asked to stop, or killed."""
        return self.stop is not Stop.NONE

    @property
    def killed(self) -> bool:
        """Whether SIGKILL has been sent to the ranks."""
        return self.stop is Stop.KILLED

    @property
    def generation(self) -> int:
        """The number of this generation, from 0."""
        return len(self.causes)

    @property
    def restarts(self) -> int:
        """How many generations ended in a failure."""
        return sum(cause.is_failure for cause in self.causes)

    @property
    def over(self) -> bool:
        """Whether nothing is left to wait for."""
        return self.phase is Phase.OVER

    @property
    def outcomes(self) -> tuple[NodeOutcome, ...]:
        """The other nodes' reports on this generation, if there are any yet."""
        return self.nodes.outcomes

    @property
    def has_killed(self) -> bool:
        """Whether SIGKILL has been sent to the ranks of any node."""
        return self.killed or any(outcome.killed for outcome in self.outcomes)

    @property
    def best_step(self) -> int | None:
        """The furthest step of any rank on any node."""
        return furthest(self.step, *(outcome.step for outcome in self.outcomes))

    @property
    def all_ranks(self) -> dict[int, RankState]:
        """The ranks of this node, and those of others that failed or were the first to leave."""
        elsewhere = (outcome.ranks.items() for outcome in self.outcomes)
        return {**dict(chain.from_iterable(elsewhere)), **self.ranks}


def delay_deadline(state: State, late_ns: int) -> State:
    """Return the state with its deadline moved by the time that an event was handled late."""
    if state.deadline_ns is None:
        return state
    return replace(state, deadline_ns=state.deadline_ns + late_ns)


def skip_time(state: State, lost_ns: int) -> State:
    """Return the state with its deadlines moved by time in which the launcher could not act."""
    begin_ns = None if state.begin_ns is None else state.begin_ns + lost_ns
    return delay_deadline(replace(state, begin_ns=begin_ns), lost_ns)


def was_stopped(state: State) -> bool:
    """Return whether a signal stopped the launch, here or on another node."""
    over = state.nodes.launch_over
    is_elsewhere = state.nodes.signum is not None or (over is not None and bool(over.signum))
    return bool(state.signals) or is_elsewhere


def furthest(*steps: int | None) -> int | None:
    """Return the largest of some steps; ``None`` if there is none."""
    return max((step for step in steps if step is not None), default=None)


def has_no_rank_left(state: State) -> bool:
    """Return whether this generation has no rank left and will start none."""
    if state.alive or state.phase in (Phase.CLEARING, Phase.ENDING, Phase.OVER):
        return False
    return state.stopping or all(rank.exited is not None for rank in state.ranks.values())
