"""A status as lines: what fits, and the phase of each rank."""

import math
import re

import pytest

from meshrun.layout import Layout
from meshrun.layout.spec import parse_mesh
from meshrun.lifecycle.phases import Stop
from meshrun.lifecycle.state import State
from meshrun.protocol.events import Hung
from meshrun.protocol.generation import RankState
from meshrun.protocol.rank_end import RankExited, RankRaised
from meshrun.report.live_status import RankStatus, Status, draw_panel
from meshrun.report.rank_status import RankPhase, phase_of

_COLOR = re.compile(r"\x1b\[[0-9;]*m")


def draw(
    mesh: str, columns: int, rows: int, *, odd: dict[int, RankPhase] | None = None
) -> list[str]:
    """Return the plain lines for a mesh whose ranks run, except for some odd ones."""
    spec = parse_mesh(mesh)
    layout = Layout(mesh=spec, nproc_per_node=(math.prod(spec.sizes),))
    ranks = tuple(
        RankStatus(
            rank=rank,
            phase=(odd or {}).get(rank, "running"),
            cpu=(rank % 100) / 100,
            memory_bytes=(rank % 7 + 1) << 30,
        )
        for rank in range(layout.world_size)
    )
    status = Status(ranks=ranks, generation=0, max_restarts=0, elapsed_s=61.0)
    return [_COLOR.sub("", line) for line in draw_panel(layout, status, columns, rows)]


@pytest.mark.parametrize("columns", [60, 100, 200])
@pytest.mark.parametrize("rows", [20, 30, 60])
@pytest.mark.parametrize("mesh", ["dp=2,tp=4", "pp=2,dp=4,tp=8", "pp=4,dp=32,tp=8"])
def test_the_panel_stays_small(mesh: str, rows: int, columns: int) -> None:
    """Never wider than the window, nor higher than a third of it."""
    lines = draw(mesh, columns, rows, odd={3: "failed", 5: "joining"})

    assert max(len(line.rstrip()) for line in lines) <= columns
    assert 2 <= len(lines) <= rows // 3


def test_a_grid_has_the_last_dim_as_its_columns() -> None:
    """Each rank's CPU use is in the row and column of its coordinate."""
    _, header, *body = draw("dp=2,tp=4", 100, 30)

    assert header.split() == ["tp0", "tp1", "tp2", "tp3"]
    assert [line.split()[0] for line in body] == ["dp0", "dp1"]
    assert [re.findall(r"(\d+)%", line) for line in body] == [
        [str(rank) for rank in range(4)],
        [str(rank) for rank in range(4, 8)],
    ]


def test_ranks_of_one_state_share_a_line_if_the_grid_does_not_fit() -> None:
    """A thousand ranks take one line per state, the worst first."""
    summary, *body = draw("pp=4,dp=32,tp=8", 100, 30, odd={1023: "joining", 0: "failed"})

    assert summary == "-- 1 failed, 1 joining, 1022 running, " + summary[38:]
    assert [line.split()[0] for line in body] == ["failed", "joining", "running"]
    assert "pp0 dp0 tp0" in body[0]
    assert "pp3 dp31 tp7" in body[1]
    assert "x1022" in body[2]


def exited(status: int) -> RankExited:
    """Return the exit of a rank with this wait status."""
    return RankExited(rank=0, pid=7, wait_status=status, at_ns=9)


RAISED = RankRaised(rank=0, at_ns=8, kind="E", message="", traceback="", shown=False)


@pytest.mark.parametrize(
    ("rank_state", "changes", "phase"),
    [
        (RankState(), {}, "starting"),
        (RankState(pid=7), {}, "joining"),
        (RankState(pid=7, ready_ns=1), {}, "running"),
        (RankState(pid=7, ready_ns=1, finished_ns=2), {}, "ending"),
        (RankState(pid=7, ready_ns=1), {"stop": Stop.ASKED}, "ending"),
        (
            RankState(pid=7, ready_ns=1),
            {"stop": Stop.ASKED, "hung": Hung(idle_s=5, at_ns=1)},
            "hung",
        ),
        (RankState(pid=7, ready_ns=1, raised=RAISED), {"stop": Stop.ASKED}, "failed"),
        (RankState(pid=7, ready_ns=1, exited=exited(0)), {}, "ended"),
        (RankState(pid=7, ready_ns=1, exited=exited(9)), {}, "failed"),
        (RankState(pid=7, exited=exited(15), asked_to_end_ns=3), {"stop": Stop.ASKED}, "ended"),
    ],
)
def test_the_phase_of_a_rank_follows_from_its_state(
    rank_state: RankState, changes: dict[str, object], phase: RankPhase
) -> None:
    state = State(shutdown_timeout_s=30.0, ranks={0: rank_state}, **changes)  # type: ignore[arg-type]

    assert phase_of(rank_state, state, has_mesh=True) == phase
