"""A report as JSON and back."""

from __future__ import annotations

from meshrun.protocol.result import LaunchResult, Resize, Timings
from meshrun.report.result_json import parse_result_json, render_result_json


def test_changes_of_nodes_come_back() -> None:
    """With everything they had."""
    resize = Resize(
        generation=2,
        left=("node1",),
        joined=("node3", "node4"),
        shapes="dp 2 -> 3",
        mesh="dp=3,tp=2",
        hosts=("node0", "node3", "node4"),
    )
    result = LaunchResult(
        exit_code=0,
        signum=None,
        failures=(),
        broken_program=None,
        trouble=None,
        timings=Timings(began_ns=1),
        resizes=(resize,),
    )

    assert parse_result_json(render_result_json(result)) == result
