"""``--check``: the schedule of pairs, findings from measurements, and requirements."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from meshrun.check.evaluate import (
    best_bus,
    evaluate,
    failed_hosts,
    format_rate,
    format_size,
)
from meshrun.check.measured import (
    Collective,
    Measured,
    PeerExchange,
    RankMeasures,
    meetings,
    pairs_of,
)
from meshrun.check.requirements import check_dims, parse_requirements
from meshrun.errors import UsageError
from meshrun.layout import Layout
from meshrun.protocol.packing import pack, unpack
from meshrun.report.check_result import render_check, render_check_json, render_check_svg

MIB = 1 << 20
SVG = "{http://www.w3.org/2000/svg}"


@given(st.integers(1, 40))
def test_every_two_ranks_meet_once(number: int) -> None:
    """In each round, they are each other's partners."""
    rounds = [list(meetings(number, own, number)) for own in range(number)]
    for turn in range(len(rounds[0])):
        for own in range(number):
            other = rounds[own][turn]
            assert other is None or (other != own and rounds[other][turn] == own)
    for own in range(number):
        met = [other for other in rounds[own] if other is not None]
        assert sorted(met) == [other for other in range(number) if other != own]


def test_ranks_meet_those_of_other_nodes() -> None:
    """A rank without a counterpart sits out."""
    layout = Layout.parse("dp=-1", nproc_per_node=(2, 2, 1))
    met = [{*pairs_of(layout, rank, 9)} - {None} for rank in range(5)]
    assert met == [{2, 4}, {3}, {0, 4}, {1}, {0, 2}]
    assert list(pairs_of(Layout.parse("dp=4"), 0, 2)) == [3, 2]


def measured(layout: Layout, rates: dict[frozenset[int], float], usual: float = 2e9) -> Measured:
    """Return measurements with these rates between nodes, or between ranks on one node."""
    many = layout.nnodes > 1
    ranks = []
    for rank in range(layout.world_size):
        exchanges = []
        for peer in pairs_of(layout, rank, 99):
            if peer is not None:
                ends = frozenset(layout.node_rank(each) if many else each for each in (rank, peer))
                exchanges.append(
                    PeerExchange(peer=peer, bytes=MIB, seconds=MIB / rates.get(ends, usual))
                )
        ranks.append(
            RankMeasures(
                rank=rank,
                host=f"n{layout.node_rank(rank)}",
                facts={"torch": "2.13"},
                clock_s=0.0,
                shares_cores=False,
                shm_bytes=8 << 30,
                gflops=100.0,
                collectives=[
                    Collective(dim=dim, op="all_reduce", bytes=MIB, seconds=0.001)
                    for dim in layout.dim_labels
                ],
                unsupported=[],
                exchanges=exchanges,
            )
        )
    return Measured(layout=layout.to_dict(), ranks=ranks)


def changed(found: Measured, rank: int, **values: object) -> Measured:
    """Return the measurements with one rank's values changed."""
    ranks = [replace(each, **values) if each.rank == rank else each for each in found.ranks]  # type: ignore[arg-type]
    return replace(found, ranks=ranks)


LAYOUT = Layout.parse("dp=4,tp=2", nproc_per_node=(2, 2, 2, 2))


def test_equal_measurements_have_no_finding() -> None:
    found = measured(LAYOUT, {})
    assert evaluate(found).findings == []
    assert unpack(pack(found), Measured) == found
    assert "found nothing wrong" in render_check(evaluate(found))


@pytest.mark.parametrize("nodes", [3, 4, 7])
def test_a_bad_node_is_distinguished_from_a_bad_link(nodes: int) -> None:
    layout = Layout.parse("dp=-1", nproc_per_node=(1,) * nodes)
    link = measured(layout, {frozenset({1, 2}): 1e8})
    assert [finding.text for finding in evaluate(link).findings] == [
        "the link between n1 and n2 is slow: 100 MB/s, while the others have 2.0 GB/s"
    ]
    node = measured(layout, {frozenset({2, other}): 2e8 for other in range(nodes) if other != 2})
    result = evaluate(node)
    (finding,) = result.findings
    assert finding.text.startswith(
        "all links of n2 are slow: 200 MB/s at best, while the others have"
    )
    assert failed_hosts([finding]) == {"n2": finding.text}
    text = render_check(result)
    passed = "".join(f"\n  n{each} slots=1" for each in range(nodes) if each != 2)
    assert text.endswith(f"hosts that passed:{passed}")
    assert json.loads(render_check_json(result))["hosts"]["failed"] == {"n2": finding.text}


def test_whatever_else_is_wrong() -> None:
    """Each problem is reported with its host and numbers."""
    found = measured(LAYOUT, {})
    cases = {
        "torch is 2.12 on n1, and 2.13 elsewhere": {"facts": {"torch": "2.12"}},
        "the clock of n1 is 3.0 s behind rank 0's": {"clock_s": -3.0},
        "rank 3 on n1 multiplies matrices at 10 GFLOPS; the median is 100": {"gflops": 10.0},
        "`/data` on n1: Permission denied": {"paths": {"/data": "Permission denied"}},
        "n1 has 64 MiB of shared memory; a container needs --shm-size": {"shm_bytes": 64 * MIB},
        "the GPU of rank 3 on n1 has 1.0 GiB of 80.0 GiB free": {
            "gpu_free_bytes": 1 << 30,
            "gpu_bytes": 80 << 30,
        },
    }
    for text, values in cases.items():
        assert [each.text for each in evaluate(changed(found, 3, **values)).findings] == [text]
    usual, slow = (
        Collective(dim=dim, op="all_reduce", bytes=MIB, seconds=seconds)
        for dim, seconds in (("dp", 0.001), ("tp", 0.01))
    )
    (finding,) = evaluate(changed(found, 3, collectives=[usual, slow])).findings
    assert finding.text == (
        "all_reduce of 1 MiB takes 10.0 ms in the group of tp with ranks 2, 3, 1.0 ms in others"
    )


def test_ranks_that_share_cores_are_not_compared() -> None:
    found = measured(LAYOUT, {frozenset({0, 1}): 1e6})
    assert evaluate(found).findings
    shared = evaluate(changed(changed(found, 0, shares_cores=True), 3, gflops=1.0))
    assert shared.findings == []
    assert "ranks share cores" in render_check(shared)


@pytest.mark.parametrize(
    ("layout", "slow", "drawn"),
    [
        (LAYOUT, [(1, 2)], ["1 and 2: 100 MB/s"]),
        (LAYOUT, [(1, other) for other in (0, 2, 3)], []),  # the node's frame is red instead
        (Layout.parse("dp=2,tp=4"), [(1, 6)], ["1 and 6: 100 MB/s"]),
        (Layout.parse("dp=64,tp=8", nproc_per_node=(8,) * 64), [(3, 40)], ["3 and 40: 100 MB/s"]),
        (Layout.parse("dp=4", nproc_per_node=(1, 3)), [], []),
    ],
)
def test_a_picture_shows_links_and_dims(
    layout: Layout, slow: list[tuple[int, int]], drawn: list[str]
) -> None:
    """It maps the links and each dim, with every rank; what is slow is red."""
    found = measured(layout, {frozenset(pair): 1e8 for pair in slow})
    picture = ET.fromstring(render_check_svg(evaluate(found)))
    titles = [title.text or "" for title in picture.iter(f"{SVG}title")]
    for rank in range(layout.world_size):
        cells = [text for text in titles if text.startswith(f"rank {rank}: ")]
        assert len(cells) == 1 + len(layout.dim_labels)
    red = [part for part in picture.iter() if part.get("class") == "slow"]
    arcs = [part.findtext(f"{SVG}title") for part in red if part.tag == f"{SVG}path"]
    assert arcs == drawn
    assert len(red) - len(arcs) == (len(slow) > 1)
    assert "in GB/s" in "".join(text.text or "" for text in picture.iter(f"{SVG}text"))


def test_requirements() -> None:
    found = measured(LAYOUT, {})
    best = best_bus(evaluate(found).rows)
    assert format_rate(best["dp"]) == "1.6 GB/s"  # 2 * 3/4 of a MiB in 1 ms
    met, not_met = parse_requirements("dp>=1.5GB/s", "--require"), "tp >= 300GB/s"
    assert evaluate(found, met).findings == []
    (finding,) = evaluate(found, parse_requirements(not_met, "--require")).findings
    assert finding.text == (
        "tp >= 300GB/s is not met: the slowest group of tp has 1.0 GB/s, ranks 0, 1"
    )
    with pytest.raises(UsageError, match="the mesh has no dim `pp`"):
        check_dims(parse_requirements("pp>=1GB/s", "--require"), LAYOUT.dim_labels)
    for text in ("", "tp", "tp>=3", "tp>=3Gbit/s", "tp<=3GB/s", "tp>=1GB/s;dp>=1GB/s"):
        with pytest.raises(UsageError, match="cannot parse"):
            parse_requirements(text, "--require")


def test_how_sizes_are_shown() -> None:
    assert [format_size(each) for each in (12, 1024, MIB, 256 * MIB)] == [
        *("12 B", "1 KiB", "1 MiB", "256 MiB"),
    ]
    assert [format_rate(each) for each in (12, 2e3, 3e6, 4.56e10)] == [
        *("12 B/s", "2 kB/s", "3 MB/s", "45.6 GB/s"),
    ]
