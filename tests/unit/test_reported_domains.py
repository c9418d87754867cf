"""Domains that nodes report when they join: their sizes, the order of nodes, and errors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from meshrun.errors import LayoutError
from meshrun.host.machine import HostFacts
from meshrun.layout.spec import parse_mesh
from meshrun.plan.hostfile import Host
from meshrun.plan.plan import LaunchPlan, build_plan, complete_plan
from meshrun.plan.request import LaunchRequest, RemoteHosts
from meshrun.protocol.events import AllJoined, JoinFailed
from meshrun.rendezvous.expected_nodes import ExpectedNodes
from meshrun.rendezvous.membership import Membership, fit_nodes
from meshrun.rendezvous.messages import Join
from meshrun.supervisor.node_link import describe_node
from tests.parties import Parties, info
from tests.plans import meeting_of, request_of


def request(mesh: str = "dp=2,tp=4", **changes: Any) -> LaunchRequest:
    """Return a launch on four nodes of two workers, with ``--intra-domain tp``."""
    return request_of(
        mesh=parse_mesh(mesh),
        **{"intra_domain": ("tp",), "nnodes": 4, "nproc_per_node": 2, **changes},
    )


def nodes(domains: str, workers: int = 2) -> list[Join]:
    """Return the joins of nodes in the domains of these letters; a dash is an unknown domain."""
    return [
        replace(info(f"node{rank}"), nproc=workers, domain=domain.replace("-", ""))
        for rank, domain in enumerate(domains)
    ]


def here(domain: str = "") -> HostFacts:
    return HostFacts(
        hostname="h", usable_cores=4, accelerator=None, accelerator_count=0, domain=domain
    )


# ---- one node, before it joins the others ------------------------------------------------------


def plan_with(domain: str = "", *, scheduler: str = "", **changes: Any) -> LaunchPlan:
    rendezvous = meeting_of(domain=scheduler, node_rank=0, endpoint="node0:29500")
    return build_plan(request(**{"rendezvous": rendezvous, **changes}), here(domain))


@pytest.mark.parametrize(
    ("changes", "known", "reported", "waits"),
    [
        ({"domain": "nvml"}, (), "nvml", True),
        ({"scheduler": "b8"}, (), "b8", True),
        ({"domain": "nvml", "scheduler": "b8"}, (), "nvml", True),
        ({"domain": "nvml", "domain_size": 2}, (2, 2), "nvml", False),
        ({"scheduler": "b8", "domain_size": 2}, (2, 2), "", False),  # the user's size counts
        ({"nnodes": 1, "nproc_per_node": 8}, (1,), "", False),
        ({"intra_domain": (), "scheduler": "b8"}, (), "", False),
        ({"rendezvous": meeting_of(step_of="7")}, (), "", True),
        (
            {
                "remote": RemoteHosts(
                    hosts=(Host("a"), Host("b"), Host("c"), Host("d")), access=request_of().access
                )
            },
            (),
            "",
            True,
        ),
    ],
)
def test_what_a_node_plans_and_reports(
    changes: dict[str, Any], known: tuple[int, ...], reported: str, waits: bool
) -> None:
    """The other nodes' domains are still unknown, so --intra-domain is not checked yet."""
    plan = plan_with(**changes)

    assert plan.layout.nodes_per_domain == known
    assert plan.waits_for_domains == waits
    assert describe_node(plan, b"secret").domain == reported


def test_a_node_that_knows_no_domain_fails_before_anything_starts() -> None:
    with pytest.raises(LayoutError, match="--intra-domain tp: no domains are known"):
        plan_with()


def test_a_plan_is_completed_with_the_domains_of_all() -> None:
    """With --place auto ranks may then take other slots than the first plan had."""
    before = plan_with("a", mesh="tp=4,dp=2", place="auto")
    after = complete_plan(before, node_rank=1, nproc_per_node=(2,) * 4, nodes_per_domain=(2, 2))

    assert (before.layout.slot_order, after.layout.slot_order) == (None, ("dp", "tp"))
    assert after.layout.within("tp") == "domain"


# ---- once all have joined ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("domains", "sizes"), [("aabb", (2, 2)), ("aaaa", (4,)), ("aa--", (2, 1, 1))]
)
def test_domains_are_what_the_nodes_report(domains: str, sizes: tuple[int, ...]) -> None:
    asked = request("dp=-1,tp=4", nnodes=None, nproc_per_node=None)
    layout = fit_nodes(asked, nodes(domains))

    assert layout.nodes_per_domain == sizes
    assert layout.shape == {"dp": 1 if "-" in domains else 2, "tp": 4}
    assert not layout.crosses_domains("tp")


@pytest.mark.parametrize(
    ("domains", "changes", "error", "hint"),
    [
        ("abab", {}, "tp=4 needs 4 ranks in one domain, but the largest domain has room for only"
         " 2 ranks on 1 node",
         "nodes 0 and 2 of domain a do not follow each other: number the nodes domain by domain"),
        ("aaab", {}, "domains (3 nodes each, the last 1) have room for only 1 of the 2 groups",
         "to fill every domain"),
        ("aabb", {"domain_size": 4}, "--domain-size 4: nodes 0 (node0) and 2 (node2) would share"
         " domain 0, but NVML reports the NVLink domains a and b", "remove --domain-size"),
        ("----", {}, "no domains are known", "--domain-size 18"),
    ],
)  # fmt: skip
def test_domains_that_do_not_fit(
    domains: str, changes: dict[str, Any], error: str, hint: str
) -> None:
    """The error gives the nodes and the numbers."""
    with pytest.raises(LayoutError) as raised:
        fit_nodes(request(**changes), nodes(domains))

    assert error in raised.value.message
    assert hint in (raised.value.hint or "")


def test_nodes_are_numbered_domain_by_domain_from_that_of_node_0() -> None:
    """Unless they were given node ranks."""
    own, *others = nodes("babaabc")
    expected = ExpectedNodes(nnodes=7, own=own)
    for number, node in enumerate(others):
        expected.join(number, node)
    order = [expected.joined[number] for number in expected.order()]

    assert "".join(node.domain for node in order) == "bbaaac"
    assert [node.host for node in order[2:5]] == ["node1", "node3", "node4"]


def test_an_elastic_launch_uses_the_nodes_of_each_domain_that_hold_whole_groups() -> None:
    """The third node of a domain could hold only half a group, so it is a spare."""
    infos = dict(enumerate(nodes("aaabbbb")))
    asked = request("dp=1:8,tp=4", nnodes=None, nproc_per_node=None)
    members = Membership(fit=partial(fit_nodes, asked), least=2, most=7, infos=infos)
    choice = members.choose()

    assert choice.participants == (0, 1, 3, 4, 5, 6)
    assert choice.spares == (2,)
    assert choice.layout.nodes_per_domain == (2, 4)


def joined(parties: Parties, domains: Sequence[str], asked: LaunchRequest) -> list[Any]:
    """Let nodes of these domains join; return the parties, the coordinator first."""
    fit = partial(fit_nodes, asked)
    settings = [{"domain": domain} for domain in domains]
    own, *others = (
        replace(node, nproc=2, **more)
        for node, more in zip((info(f"node{n}") for n in range(4)), settings, strict=True)
    )
    coordinator = parties.coordinator(4, fit=fit, own=own)
    return [coordinator, *(parties.participant(other, nnodes=4) for other in others)]


def test_all_nodes_receive_the_domains(parties: Parties) -> None:
    """So each completes the same plan; nodes without a node rank are sorted by domain."""
    all_of_them = joined(parties, "abab", request())
    parties.until(lambda: all(party.received(AllJoined) for party in all_of_them))
    received = [party.received(AllJoined)[0] for party in all_of_them]

    assert {each.nodes_per_domain for each in received} == {(2, 2)}
    assert {each.hosts for each in received} == {("node0", "node2", "node1", "node3")}


def test_no_rank_starts_where_domains_do_not_fit(parties: Parties) -> None:
    """Every node receives the error."""
    all_of_them = joined(parties, "aaab", request())
    parties.until(lambda: all(party.received(JoinFailed) for party in all_of_them))

    for party in all_of_them:
        assert "only 1 of the 2 groups of 4" in party.received(JoinFailed)[0].error.message
        assert not party.received(AllJoined)
