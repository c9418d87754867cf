"""What a node reports to the coordinator after a generation of ranks, as plain values. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from meshrun.errors import MeshrunError
from meshrun.lifecycle.blame import judge
from meshrun.lifecycle.evidence import Evidence
from meshrun.lifecycle.state import Cause, RankState, State
from meshrun.protocol.events import RankExited, RankRaised
from meshrun.protocol.result import Resize


def outcome_to_json(
    state: State,
    *,
    headline: str,
    trouble: MeshrunError | None,
    evidence: Mapping[int, Evidence],
    failure: str = "",
) -> dict[str, Any]:
    """Return the report on this node's ranks: those that failed, and the first that left.

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
    ranks = state.ranks.values()
    return {
        "headline": headline,
        "signum": state.signals[0] if state.signals else 0,
        "is_well": all(known.exited and known.exited.wait_status == 0 for known in ranks),
        "killed": state.killed,
        "is_hung": state.hung is not None,
        "step": state.step,
        "failure": failure,
        "trouble": None if trouble is None else error_to_json(trouble),
        "ranks": {str(rank): asdict(state.ranks[rank]) for rank in sorted(telling)},
        "evidence": {str(rank): asdict(evidence[rank]) for rank in telling if rank in evidence},
    }


def error_to_json(error: MeshrunError) -> dict[str, Any]:
    """Return an error as plain values."""
    return {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}


def error_from_json(values: Mapping[str, Any]) -> MeshrunError:
    """Return the error that :func:`error_to_json` told."""
    error = MeshrunError(str(values["message"]), hint=values.get("hint"))
    error.exit_code = int(values["exit_code"])
    return error


def ranks_from_json(outcome: Mapping[str, Any]) -> dict[int, RankState]:
    """Return the ranks of an outcome."""
    return {int(rank): _rank(values) for rank, values in outcome.get("ranks", {}).items()}


def evidence_of(outcomes: Sequence[Mapping[str, Any]]) -> dict[int, Evidence]:
    """Return the evidence in all outcomes."""
    return {
        int(rank): Evidence(
            last_lines=tuple(values["last_lines"]),
            stack=tuple(values["stack"]),
            place=values["place"],
            why=values["why"],
        )
        for outcome in outcomes
        for rank, values in outcome.get("evidence", {}).items()
    }


def cause_to_json(cause: Cause) -> dict[str, Any]:
    """Return the cause of a restart as plain values."""
    return asdict(cause)


def cause_from_json(values: Mapping[str, Any]) -> Cause:
    """Return the cause that :func:`cause_to_json` told."""
    raised, resize = values.get("raised"), values.get("resize")
    if resize:
        lists = {name: tuple(resize[name]) for name in ("left", "joined", "hosts")}
        resize = Resize(**{**resize, **lists})
    raised = RankRaised(**raised) if raised else None
    return Cause(**{**values, "raised": raised, "resize": resize or None})


def _rank(values: dict[str, Any]) -> RankState:
    raised, exited = values.get("raised"), values.get("exited")
    return RankState(
        **{
            **values,
            "raised": RankRaised(**raised) if raised else None,
            "exited": RankExited(**exited) if exited else None,
        }
    )
