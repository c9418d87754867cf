"""NVLink domains that nodes share: which ranks are in which, and groups that stay within one."""

from __future__ import annotations

import itertools
import json
import math
import pickle
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshrun.errors import LayoutError
from meshrun.layout import Layout
from meshrun.layout.domains import domains_of, shorten_domains, split_nodes
from meshrun.layout.environment import format_layout, read_layout
from meshrun.layout.layout import solve_layout
from meshrun.layout.spec import parse_mesh

NAMES = "abcd"
MOST_RANKS = 12


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[str], list[str]]:
    """Sizes of a mesh, workers of nodes, nodes of domains, dims within a node and a domain."""
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        sizes.append(draw(st.integers(1, MOST_RANKS // math.prod(sizes))))
    left, slots = math.prod(sizes), list[int]()
    if draw(st.booleans()):
        each = draw(st.sampled_from([part for part in range(1, left + 1) if left % part == 0]))
        slots = [each] * (left // each)
    else:
        while left:
            slots.append(draw(st.integers(1, left)))
            left -= slots[-1]
    domains, nodes = list[int](), len(slots)
    while nodes:
        domains.append(draw(st.integers(1, nodes)))
        nodes -= domains[-1]
    dims = st.sets(st.sampled_from(NAMES[: len(sizes)]))
    return sizes, slots, domains, sorted(draw(dims)), sorted(draw(dims))


def can_be(
    sizes: Sequence[int],
    slots: Sequence[int],
    domains: Sequence[int],
    in_node: Sequence[str],
    in_domain: Sequence[str],
) -> bool:
    """Whether any placement satisfies this, found by trying every node for each rank."""
    of_node = [domain for domain, nodes in enumerate(domains) for _ in range(nodes)]
    coordinates = list(itertools.product(*map(range, sizes)))
    apart = [  # for each rank, the dims in which it differs from each rank before it
        [
            [NAMES[dim] for dim in range(len(sizes)) if one[dim] != other[dim]]
            for other in coordinates[:rank]
        ]
        for rank, one in enumerate(coordinates)
    ]
    free, seats = list(slots), list[int]()

    def seat() -> bool:
        rank = len(seats)
        if rank == len(coordinates):
            return True
        tried = set()
        for node, left in enumerate(free):
            kind = (left, of_node[node])
            if not left or (node not in seats and kind in tried):
                continue
            tried.add(kind)
            if any(
                len(differ) == 1
                and (
                    (differ[0] in in_node and seats[other] != node)
                    or (differ[0] in in_domain and of_node[seats[other]] != of_node[node])
                )
                for other, differ in enumerate(apart[rank])
            ):
                continue
            free[node] -= 1
            seats.append(node)
            if seat():
                return True
            seats.pop()
            free[node] += 1
        return False

    return seat()


def text(sizes: Sequence[int]) -> str:
    return ",".join(f"{name}={size}" for name, size in zip(NAMES, sizes, strict=False))


def solve(
    mesh: str,
    slots: Sequence[int],
    domains: Sequence[int],
    in_node: Sequence[str] = (),
    in_domain: Sequence[str] = (),
    *,
    place: str = "auto",
) -> Layout:
    return solve_layout(
        parse_mesh(mesh),
        nproc_per_node=slots,
        domains=domains,
        intra_node=in_node,
        intra_domain=in_domain,
        renumber=place == "auto",
    )


@given(cases(), st.sampled_from(["contiguous", "auto"]))
def test_every_answer_agrees_with_a_count_rank_by_rank(
    case: tuple[list[int], list[int], list[int], list[str], list[str]], place: str
) -> None:
    """Each rank is in its node's domain; requested dims stay within node or domain."""
    sizes, slots, domains, in_node, in_domain = case
    try:
        layout = solve(text(sizes), slots, domains, in_node, in_domain, place=place)
    except LayoutError as error:
        assert error.hint
        return
    of_node = [domain for domain, nodes in enumerate(domains) for _ in range(nodes)]
    found = [layout.domain(rank) for rank in range(layout.world_size)]
    assert found == [of_node[layout.node_rank(rank)] for rank in range(layout.world_size)]
    assert [node for domain in range(len(domains)) for node in layout.nodes_of_domain(domain)] == [
        *range(len(slots))
    ]
    for dim in layout.shape:
        groups = [list(group) for group in layout.groups(dim)]
        in_domains = [{found[rank] for rank in group} for group in groups]
        in_nodes = [{layout.node_rank(rank) for rank in group} for group in groups]
        rails = [{layout.local_rank(rank) for rank in group} for group in groups]
        crossing = sum(len(each) > 1 for each in in_domains)
        assert layout.count_crossing(dim, "domains") == crossing
        assert layout.crosses_domains(dim) == (crossing > 0)
        assert [layout.crosses_domains(group) for group in groups] == [
            len(each) > 1 for each in in_domains
        ]
        holds = {
            "node": all(len(each) == 1 for each in in_nodes),
            "domain": crossing == 0,
            "rail": all(len(each) == 1 for each in rails),
            None: True,
        }
        assert layout.within(dim) == next(word for word, is_so in holds.items() if is_so)
        assert not (dim in in_domain and crossing)
        assert not (dim in in_node and layout.crosses_nodes(dim))
    again = Layout.from_dict(json.loads(json.dumps(layout.to_dict())))
    env = {"WORLD_SIZE": str(layout.world_size), "GROUP_WORLD_SIZE": str(layout.nnodes)}
    from_env = read_layout({**env, **format_layout(layout)})
    assert again == from_env == layout == pickle.loads(pickle.dumps(layout))
    for each in (again, from_env):
        assert each.nodes_per_domain == layout.nodes_per_domain == tuple(domains)


@given(cases())
def test_ranks_are_placed_if_they_can_be(
    case: tuple[list[int], list[int], list[int], list[str], list[str]],
) -> None:
    """Exactly if trying every node for each rank finds a way."""
    sizes, slots, domains, in_node, in_domain = case
    try:
        solve(text(sizes), slots, domains, in_node, in_domain)
        is_placed = True
    except LayoutError:
        is_placed = False
    assert is_placed == can_be(*case)


@given(cases(), st.integers(0, 3), st.integers(0, 4))
def test_an_open_size_is_the_largest_that_can_be(
    case: tuple[list[int], list[int], list[int], list[str], list[str]], at: int, more: int
) -> None:
    """The launch may have any number of spare workers."""
    sizes, slots, domains, in_node, in_domain = case
    slots = [*slots[:-1], slots[-1] + more]
    at %= len(sizes)
    rest = math.prod(sizes) // sizes[at]
    most = sum(slots) // rest
    fits = [0]
    for size in range(1, most + 1):
        tried = [*sizes[:at], size, *sizes[at + 1 :]]
        if math.prod(tried) <= MOST_RANKS and can_be(tried, slots, domains, in_node, in_domain):
            fits.append(size)
    open_mesh = text(sizes).replace(f"{NAMES[at]}={sizes[at]}", f"{NAMES[at]}=-1")
    try:
        found = solve(open_mesh, slots, domains, in_node, in_domain).sizes[at]
    except LayoutError:
        found = 0
    if found * rest <= MOST_RANKS:
        assert found == max(fits)


@example(([2, 3, 1, 2], [4, 4, 4], [2, 1], [], ["a"]), "auto")
@given(cases(), st.sampled_from(["contiguous", "auto"]))
def test_a_domain_of_one_node_is_that_node_and_one_of_all_never_fails(
    case: tuple[list[int], list[int], list[int], list[str], list[str]], place: str
) -> None:
    sizes, slots, _, in_node, in_domain = case
    both = sorted({*in_node, *in_domain})

    def seats(domains: list[int], node: list[str], domain: list[str]) -> list[tuple[int, int]]:
        try:
            layout = solve(text(sizes), slots, domains, node, domain, place=place)
        except LayoutError:
            return []
        return [layout.slot(rank) for rank in range(layout.world_size)]

    alone = [1] * len(slots)
    assert bool(seats(alone, in_node, in_domain)) == bool(seats(alone, both, []))
    as_domains, as_nodes = seats(alone, [], in_domain), seats(alone, in_domain, [])
    assert [node for node, _ in as_domains] == [node for node, _ in as_nodes]
    if place == "contiguous":  # "auto" puts a node's dims last, a domain's no later than needed
        assert as_domains == as_nodes
    assert seats([len(slots)], [], in_domain) == [
        (node, local) for node, count in enumerate(slots) for local in range(count)
    ]


def test_a_rack_that_is_not_full_takes_whole_groups() -> None:
    """100 nodes in racks of 18: the last has 10; groups of 16 leave 8 workers of each unused."""
    layout = Layout.parse(
        "dp=-1,tp=16", nnodes=100, nproc_per_node=4, domain_size=18, intra_domain=["tp"]
    )

    assert layout.nodes_per_domain == (18, 18, 18, 18, 18, 10)
    assert layout.shape == {"dp": 22, "tp": 16}
    assert [sum(layout.nproc_per_node[node] for node in layout.nodes_of_domain(domain))
            for domain in range(6)] == [64, 64, 64, 64, 64, 32]  # fmt: skip
    assert not layout.crosses_domains("tp")
    assert layout.slot_order is None


def test_both_requirements_hold_at_once() -> None:
    """cp within a node, tp within a domain, although the mesh has them in the other order."""
    layout = Layout.parse(
        "cp=4,pp=2,tp=8,dp=2", nnodes=32, nproc_per_node=4, domain_size=16,
        intra_node=["cp"], intra_domain=["tp"], place="auto",
    )  # fmt: skip

    assert layout.slot_order == ("pp", "tp", "dp", "cp")
    within = {dim: layout.within(dim) for dim in layout.shape}
    assert within == {"cp": "node", "pp": "rail", "tp": "domain", "dp": "domain"}


def test_dims_that_were_not_requested_stay_near() -> None:
    """tp stays within a node although cp has to move; it crosses nodes only if there is no room."""
    layout = Layout.parse(
        "cp=2,dp=4,tp=4", nnodes=8, nproc_per_node=4, domain_size=4,
        intra_domain=["cp"], place="auto",
    )  # fmt: skip
    assert layout.slot_order == ("dp", "cp", "tp")
    assert [layout.within(dim) for dim in layout.shape] == ["domain", "rail", "node"]
    tight = solve("a=2,b=2,c=2,d=2", [4, 4, 4, 2, 2], [2, 2, 1], in_domain=["c"])
    assert tight.slot_order == ("a", "b", "d", "c")


def test_nothing_is_renumbered_that_is_right_already() -> None:
    """The mesh keeps its order if that works, even with dims between the requested ones."""
    given_order = Layout.parse(
        "tp=2,dp=4,cp=2", nnodes=8, nproc_per_node=2, domain_size=8,
        intra_node=["cp"], intra_domain=["tp"], place="auto",
    )  # fmt: skip
    assert given_order.slot_order is None
    uneven = solve("a=-1,b=2,c=1", [3, 3], [2], ["b"], place="contiguous")
    assert (uneven.nproc_per_node, uneven.slot_order) == ((2, 2), None)


@pytest.mark.parametrize(
    ("mesh", "options", "error", "hint"),
    [
        ("tp=8,dp=4", {"intra_domain": ["tp"], "domain_size": 4},
         "--intra-domain: 4 of 4 groups of tp cross domains (4 nodes each); the first one,"
         " {0,4,..,28}, is in domains 0, 1",
         "put tp last: --mesh dp=4,tp=8; or keep the mesh and renumber ranks: --place auto"),
        ("tp=8,dp=4", {"intra_domain": ["tp"], "intra_node": ["dp"], "domain_size": 4},
         "--intra-domain: tp=8 x dp=4 needs 32 ranks in one domain, but the largest domain has room"
         " for only 16 ranks on 4 nodes",
         "use smaller or fewer dims"),
        ("pp=2,dp=1,cp=4,tp=4", {"intra_domain": ["pp"], "intra_node": ["tp"], "domain_size": 2},
         "--intra-domain: 16 of 16 groups of pp cross domains (2 nodes each); the first one,"
         " {0,16}, is in domains 0, 2",
         "reorder the dims: --mesh dp=1,cp=4,pp=2,tp=4; or keep the mesh and renumber ranks:"
         " --place auto"),
        ("dp=4,tp=8", {"intra_domain": ["tp"], "domain_size": 3},
         "--intra-domain: tp=8 needs 8 ranks in one domain, but domains (3 nodes each, the last 2)"
         " have room for only 3 of the 4 groups of 8 ranks",
         "choose sizes whose product divides 4 to fill every domain, or infer one, such as dp=-1,"
         " to leave the rest of each spare"),
        ("dp=4,tp=8", {"intra_domain": ["tp"]}, "--intra-domain tp: no domains are known",
         "pass the number of consecutive nodes that share one, such as --domain-size 18"),
        ("dp=4,tp=8", {"intra_domain": ["pp"], "domain_size": 4},
         "--intra-domain: mesh `dp=4,tp=8` has no dim `pp`", "use a dim of the mesh: `dp`, `tp`"),
        ("dp=4,tp=8", {"intra_domain": ["tp", "tp"], "domain_size": 4},
         "--intra-domain names dim `tp` twice", "name each dim once"),
        ("dp=4,tp=8", {"intra_node": ["tp", "tp"]},
         "--intra-node names dim `tp` twice", "name each dim once"),
        ("dp=4,tp=8", {"domain_size": 0}, "--domain-size must be at least 1, found 0", None),
        ("dp=4,tp=8", {"domain_size": 18},
         "--domain-size 18 is more than the 8 nodes of this launch",
         "use --domain-size 8 if all nodes share one domain"),
    ],
)  # fmt: skip
def test_what_is_impossible_is_reported_with_numbers(
    mesh: str, options: dict[str, object], error: str, hint: str | None
) -> None:
    with pytest.raises(LayoutError) as raised:
        Layout.parse(mesh, nnodes=8, nproc_per_node=4, **options)  # type: ignore[arg-type]

    assert (raised.value.message, raised.value.hint) == (error, hint)


def test_hints_help() -> None:
    """A mesh that a hint proposes needs no renumbering."""
    with pytest.raises(LayoutError) as raised:
        Layout.parse("tp=8,cp=4,dp=2", nnodes=16, nproc_per_node=4, domain_size=8,
                     intra_domain=["tp"], intra_node=["cp"])  # fmt: skip
    better = str(raised.value.hint).partition("--mesh ")[2].partition(";")[0]

    assert Layout.parse(better, nnodes=16, nproc_per_node=4, domain_size=8,
                        intra_domain=["tp"], intra_node=["cp"]).slot_order is None  # fmt: skip


@given(st.integers(1, 40), st.integers(1, 40))
def test_domains_of_one_size_are_written_as_that_size(nodes: int, size: int) -> None:
    if size <= nodes:
        domains = split_nodes(nodes, size)
        assert sum(domains) == nodes
        assert {*domains[:-1]} <= {size}
        assert shorten_domains(domains) == size
        assert domains_of([str(node // size) for node in range(nodes)]) == domains


def test_domains_are_runs_of_nodes_that_report_the_same() -> None:
    """A node that reports none is alone, and a domain with gaps counts as several."""
    assert domains_of(["a", "a", "b"]) == (2, 1)
    assert domains_of(["", "a", "a", "", ""]) == (1, 2, 1, 1)
    assert domains_of(["a", "b", "a"]) == (1, 1, 1)
    assert domains_of(["", ""]) == ()


def test_domains_must_cover_the_nodes() -> None:
    with pytest.raises(LayoutError, match="2 domains with 3 nodes do not divide 2 nodes"):
        Layout(mesh=None, nproc_per_node=(2, 2), nodes_per_domain=(1, 2))
    plain = Layout(mesh=None, nproc_per_node=(2, 2))
    for ask in (plain.domain, plain.nodes_of_domain):
        with pytest.raises(LayoutError, match="no domains are known"):
            ask(0)
    with pytest.raises(LayoutError, match="domain 2 does not exist"):
        Layout.parse(None, nnodes=4, nproc_per_node=1, domain_size=2).nodes_of_domain(2)
