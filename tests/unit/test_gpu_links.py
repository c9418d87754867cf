"""Links between GPUs, from a fake driver."""

from __future__ import annotations

import ctypes

import pytest

from meshrun.host.gpus import read_domain, read_gpu_links, visible_gpus
from meshrun.host.machine import GpuLinks
from tests.nvml import FakeNvml, card
from tests.plans import plan_of

Ends = list[int | str | None]


def read(
    monkeypatch: pytest.MonkeyPatch, links: list[Ends], levels: dict[tuple[int, int], int]
) -> GpuLinks:
    """Read the links of GPUs on the buses 0, 1, 2 ...; ``levels`` are their paths over PCI."""
    cards = [
        card(
            f"GPU-{bus}", bus, links=ends,
            levels={str(sum(pair) - bus): at for pair, at in levels.items() if bus in pair},
        )
        for bus, ends in enumerate(links)
    ]  # fmt: skip
    nvml = FakeNvml(cards)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: nvml)
    found = read_gpu_links(visible_gpus("cuda", {})[1])
    assert found is not None
    assert nvml.open == 0
    return found


def test_links_are_counted_directly_and_through_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links that are down do not count; without links, the path over PCI is shown."""
    straight = read(monkeypatch, [[1, 1, None], [0, 0], []], {(0, 2): 30, (1, 2): 50})
    switched = read(monkeypatch, [["switch"] * 4, ["switch"] * 3], {})
    unknown = read(monkeypatch, [[], []], {})

    assert straight.pairs == (("X", "NV2", "PHB"), ("NV2", "X", "SYS"), ("PHB", "SYS", "X"))
    assert switched.pairs == (("X", "NV3"), ("NV3", "X"))
    assert unknown.pairs == (("X", "?"), ("?", "X"))


@pytest.mark.parametrize(
    ("devices", "weakest"),
    [([0, 1], "NV2"), ([0, 1, 2], "SYS"), ([0, 2], "PHB"), ([0], None), ([0, 7], None)],
)
def test_the_slowest_link_counts(
    devices: list[int], weakest: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More links are faster, and any link is faster than PCI."""
    links = read(monkeypatch, [[1, 1, None], [0, 0], []], {(0, 2): 30, (1, 2): 50})

    assert links.weakest(devices) == weakest
    assert GpuLinks.weakest_of(["NV4", "NV18", "?"]) == "?"


def test_a_dry_run_shows_the_slowest_link_of_each_dim(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the groups on this node."""
    from msgspec.structs import replace

    from meshrun.report.dry_run import print_dry_run

    far = dict.fromkeys([(0, 2), (0, 3), (1, 2), (1, 3)], 50)
    links = read(monkeypatch, [[1, 1], [0, 0], [3], [2]], far)
    here = plan_of(mesh="dp=2,tp=2", device="cuda")
    here = replace(here, host=replace(here.host, links=links))

    print_dry_run(here)

    text = capsys.readouterr().out
    assert "dp: slowest link on this node SYS" in text
    assert "tp: slowest link on this node NV1, between gpus 2 3" in text


@pytest.mark.parametrize(
    ("fabrics", "domain"),
    [
        ([(7, 3, 3), (7, 3, 3)], "07" * 16 + "/3"),
        ([(7, 3, 3), (7, 4, 3)], ""),
        ([(7, 3, 3), (7, 3, 2)], ""),  # the fabric manager has not finished
        ([(0, 0, 3), (0, 0, 3)], ""),  # NVLinks do not leave the node
        ([None, None], ""),
        ([], ""),
    ],
)
def test_a_node_is_in_the_domain_of_all_its_gpus(
    monkeypatch: pytest.MonkeyPatch, fabrics: list[tuple[int, int, int] | None], domain: str
) -> None:
    """By the UUID and the clique that NVML reports for each."""
    cards = [card(f"GPU-{bus}", bus, fabric=fabric) for bus, fabric in enumerate(fabrics)]
    nvml = FakeNvml(cards)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: nvml)

    assert read_domain(visible_gpus("cuda", {})[1]) == domain
    assert nvml.open == 0
