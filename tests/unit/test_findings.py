"""The problems that a dry run reports, and its report on one rank."""

from __future__ import annotations

import json
import os

import pytest

from meshrun.errors import UsageError
from meshrun.layout import Layout
from meshrun.layout.selection import find_rank
from meshrun.report.dry_run import environment_of, render_rank_json
from meshrun.report.findings import describe_spare_workers, find_problems
from meshrun.report.plan_json import render_plan_json
from tests.plans import plan_of


@pytest.mark.parametrize(
    ("mesh", "nnodes", "found"),
    [
        ("dp=2,tp=4", 2, []),
        ("dp=4", 4, []),
        ("tp=4,dp=2", 2, [("tp: 2 of 2 groups cross nodes", "put tp last: --mesh dp=2,tp=4")]),
        ("tp=8,dp=1", 2, [("tp: 1 of 1 group crosses nodes",
                           "its 8 ranks exceed the 4 workers of a node; make tp smaller")]),
        ("tp=4", 4, [("tp: 1 of 1 group crosses nodes",
                      "its 4 ranks exceed the 1 worker of a node; make tp smaller")]),
        ("dp=4,tp=3", 3, [("tp: 2 of 4 groups cross nodes",
                           "a node's 4 workers are not a multiple of 3; use --nproc-per-node 3")]),
        ("cp=2,tp=2,dp=2", 2, [("cp: 4 of 4 groups cross nodes",
                                "put cp last: --mesh tp=2,dp=2,cp=2")]),
        ("tp=2,cp=2,pp=2", 2, [("tp: 4 of 4 groups cross nodes",
                                "put tp last: --mesh cp=2,pp=2,tp=2")]),
    ],
)  # fmt: skip
def test_each_finding_has_a_remedy(mesh: str, nnodes: int, found: list[tuple[str, str]]) -> None:
    """Dims with the most traffic come first; dims that may cross nodes are not reported."""
    layout = Layout.parse(mesh, nnodes=nnodes)

    assert [(one.problem, one.fix) for one in find_problems(layout)] == found
    for _, fix in found:
        if "--mesh " in fix:
            better = Layout.parse(fix.partition("--mesh ")[2], nnodes=nnodes)
            worst = next(find_problems(better), None)
            assert worst is None or worst.problem[:2] != fix.split()[1]


@pytest.mark.parametrize(
    "values",
    [
        {"mesh": "dp=2,tp=4", "nnodes": "2"},
        {"mesh": "8", "nnodes": "3", "nproc_per_node": "4,1,3", "node_rank": "1",
         "rdzv_endpoint": "a:1"},
        {"mesh": "pp=2,dp=2,cp=2,tp=2", "nnodes": "5", "nproc_per_node": "4,4,4,2,2",
         "intra_node": ["cp"], "place": "auto"},
        {"mesh": "dp=4", "device": "cuda", "virtual_local_rank": True},
        {"nproc_per_node": "3", "nnodes": "2"},
        {"mesh": "1"},
    ],
)  # fmt: skip
def test_json_has_what_the_plan_says_of_each_rank(values: dict[str, object]) -> None:
    """Although only one rank for each local rank is encoded."""
    asked = plan_of(**values)
    text = render_plan_json(asked)

    assert json.loads(text)["ranks"] == [
        {"rank": rank.rank, "node_rank": rank.node_rank, "local_rank": rank.local_rank,
         "device": rank.device, "coordinate": list(rank.coordinate), "cpus": None, "gpu": None}
        for rank in asked.ranks()
    ]  # fmt: skip
    assert (
        sum(line.startswith('  {"rank": ') for line in text.splitlines()) == asked.layout.world_size
    )


@pytest.mark.parametrize(
    ("mesh", "size", "found"),
    [
        ("tp=16,dp=2", 4, [("tp: 2 of 2 groups cross domains",
                            "put tp last: --mesh dp=2,tp=16")]),
        ("dp=2,tp=16", 4, []),  # they cross nodes within an NVLink domain
        ("tp=32", 4, [("tp: 1 of 1 group crosses domains",
                       "its 32 ranks exceed the 16 workers of a domain; make tp smaller")]),
        ("dp=4,tp=8", 3, [("tp: 1 of 4 groups crosses domains",
                           "a domain's 12 workers are not a multiple of 8; use a size of tp that"
                           " divides the workers of every domain")]),
        ("cp=2,tp=8,dp=2", 2, [("tp: 4 of 4 groups cross domains",
                                "put tp last: --mesh cp=2,dp=2,tp=8"),
                               ("cp: 16 of 16 groups cross domains",
                                "put cp last: --mesh tp=8,dp=2,cp=2")]),
    ],
)  # fmt: skip
def test_known_domains_count_instead_of_nodes(
    mesh: str, size: int, found: list[tuple[str, str]]
) -> None:
    layout = Layout.parse(mesh, nnodes=8, nproc_per_node=4, domain_size=size)

    assert [(one.problem, one.fix) for one in find_problems(layout)] == found


def test_a_dry_run_says_what_each_dim_stays_within(capsys: pytest.CaptureFixture[str]) -> None:
    """In the table and in JSON; the report on one rank also has its domain."""
    from meshrun.report.dry_run import print_dry_run, print_rank

    placed = plan_of(mesh="pp=2,dp=2,cp=2,tp=2", nnodes="5", nproc_per_node="4,4,4,2,2",
                  domain_size="2", intra_domain=["cp"], place="auto")  # fmt: skip
    print_dry_run(placed)
    print_rank(placed, 11)
    shown = capsys.readouterr().out.splitlines()
    found = json.loads(render_plan_json(placed))

    assert "domains: 2 of 2 nodes, 1 of 1 node" in shown
    rows = [line.split() for line in shown if line.count(" of 8 ") == 2]
    assert [(row[0], row[3], row[6], row[9]) for row in rows] == [
        ("pp", "8", "8", "-"), ("dp", "8", "2", "-"), ("cp", "0", "0", "node"),
        ("tp", "2", "2", "-"),
    ]  # fmt: skip
    assert found["nodes_per_domain"] == [2, 2, 1]
    assert [(dim["within"], dim["groups_crossing_domains"]) for dim in found["dims"]] == [
        (None, 8), (None, 2), ("node", 0), (None, 2),
    ]  # fmt: skip
    assert "domain 1 of 3" in shown
    assert "MESHRUN_NODES_PER_DOMAIN=2" in shown


def test_spares_are_named() -> None:
    """With the nodes that have some, or the first of many."""
    uneven = plan_of(mesh="dp=-1,tp=3", nproc_per_node="8,4", intra_node=["tp"])
    many = plan_of(mesh="dp=-1,tp=3", nproc_per_node="4", nnodes="5", intra_node=["tp"])

    assert describe_spare_workers(uneven) == "3 of 12 workers are spare: node 0 has 2, node 1 has 1"
    assert describe_spare_workers(many) == (
        "5 of 20 workers are spare: node 0 has 1, node 1 has 1, node 2 has 1"
        ", and 2 more nodes have some"
    )
    assert plan_of(mesh="dp=2").spare_workers == ()


def test_a_rank_is_named_by_number_or_coordinate() -> None:
    """A name of no rank, or of several, is an error."""
    two = plan_of(mesh="dp=2,tp=4", nnodes="2")

    assert find_rank(two.layout, "5") == find_rank(two.layout, "dp=1,tp=1") == 5
    for wrong in ("8", "dp=1", "tp=0-3"):
        with pytest.raises(UsageError, match="--rank"):
            find_rank(two.layout, wrong)


def test_one_rank_is_shown_as_a_launch_would_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only variables that meshrun sets are shown, and no secrets of the environment."""
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    placed = plan_of(mesh="tp=4,dp=2", nnodes="2", intra_node=["tp"], place="auto")
    environment = environment_of(placed, placed.rank(5))
    found = json.loads(render_rank_json(placed, 5))

    assert environment["MESHRUN_SLOT_ORDER"] == "dp,tp"
    assert (environment["GROUP_RANK"], environment["LOCAL_RANK"]) == ("1", "2")
    assert "hunter2" not in json.dumps(found)
    assert "SECRET_TOKEN" in os.environ
    assert found["environment"] == environment
    assert found["peers"]["tp"] == {"dim_rank": 2, "group": [1, 3, 5, 7]}
    assert (found["node_rank"], found["local_rank"]) == (1, 2)
