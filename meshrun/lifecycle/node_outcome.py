"""What this node reports to the coordinator after a generation. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from meshrun.errors import MeshrunError
from meshrun.lifecycle.blame import judge
from meshrun.lifecycle.state import State
from meshrun.protocol.generation import Evidence, NodeOutcome, Trouble


def node_outcome(
    state: State,
    *,
    headline: str,
    trouble: MeshrunError | None,
    evidence: Mapping[int, Evidence],
    failure: str = "",
) -> NodeOutcome:
    """Return what the coordinator needs to know of this node's ranks.

    Args:
        state: Of this node.
        headline: What decided it, in one line.
        trouble: What ended the generation from outside the ranks, if anything did.
        evidence: Of ranks that failed.
        failure: The same in a few words, if ranks may start again after it.
    """
    failed = {verdict.rank for verdict in judge(state)}
    left = [(known.finished_ns, rank) for rank, known in state.ranks.items() if known.finished_ns]
    telling = failed | {rank for _, rank in sorted(left)[:1]}
    return NodeOutcome(
        headline=headline,
        signum=state.signals[0] if state.signals else 0,
        is_well=all(
            known.exited and known.exited.wait_status == 0 for known in state.ranks.values()
        ),
        killed=state.killed,
        is_hung=state.hung is not None,
        step=state.step,
        failure=failure,
        trouble=None if trouble is None else Trouble.of(trouble),
        ranks={rank: state.ranks[rank] for rank in sorted(telling)},
        evidence={rank: evidence[rank] for rank in telling if rank in evidence},
    )
