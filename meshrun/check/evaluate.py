"""Findings about dims, ranks, nodes and links from the measurements of a check. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from msgspec import Struct

from meshrun.check.measured import BUS_FACTOR, Measured, Op, RankMeasures
from meshrun.check.requirements import Requirement
from meshrun.layout import Layout
from meshrun.wording import count, listed, size

SLOW = 2.0
"""How many times slower than the others something must be to be reported."""
_CLOCKS_S = 1.0
_SMALL_SHM = 1 << 30
"""Bytes; a container has 64 MiB by default, which NCCL and data loaders fill."""
_FREE_GPU = 0.9


class DimRow(Struct, frozen=True, kw_only=True):
    """One operation of one size over the groups of a dim."""

    dim: str
    op: Op
    bytes: int
    seconds: tuple[float, float, float]
    """Fastest, median and slowest time of the groups; a group takes as long as its slowest rank."""
    bus: float
    """Bus bandwidth of the slowest group, in bytes per second."""
    slowest: tuple[int, ...]
    """The ranks of the slowest group."""


class LinkRates(Struct, frozen=True, kw_only=True):
    """Bandwidths of the links between nodes, or between the ranks of one node."""

    rates: dict[frozenset[int], float]
    """Bytes per second by the two ends of a link."""
    usual: float
    slow: frozenset[frozenset[int]]
    """Links with less than half of the usual bandwidth."""

    @property
    def bad_ends(self) -> list[int]:
        """The nodes, or ranks, all of whose links are slow."""
        found = []
        for unit in sorted(set().union(*self.rates)):
            links = [pair for pair in self.rates if unit in pair]
            if len(links) > 1 and self.slow.issuperset(links):
                found.append(unit)
        return found


class Finding(Struct, frozen=True, kw_only=True):
    """A problem to report, and the hosts to leave out because of it."""

    text: str
    hosts: tuple[str, ...] = ()


class CheckResult(Struct, frozen=True, kw_only=True):
    """The measurements of a check and what they show."""

    measured: Measured
    layout: Layout
    rows: list[DimRow]
    """A row for each operation and size, in the order of measurement."""
    links: LinkRates
    findings: list[Finding]
    """The most severe first."""


def evaluate(measured: Measured, required: Sequence[Requirement] = ()) -> CheckResult:
    """Return what the measurements show.

    If ranks share cores, their speeds and those of links are random, and are not compared.
    """
    layout, ranks = Layout.from_dict(measured.layout), measured.ranks
    rows, links = _dim_rows(measured, layout), _link_rates(measured, layout)
    findings = [*_unmet(required, rows), *_differing(ranks), *_paths(ranks)]
    if not measured.shares_cores:
        findings += [
            *_slow_links(ranks, layout, links),
            *_slow_products(ranks),
            *_slow_groups(rows),
        ]
    findings += _too_little_memory(ranks)
    return CheckResult(measured=measured, layout=layout, rows=rows, links=links, findings=findings)


def _dim_rows(measured: Measured, layout: Layout) -> list[DimRow]:
    """Return a row for each operation and size, in the order of measurement."""
    rows = []
    for (dim, op, length), seconds in _group_seconds(measured, layout).items():
        worst = max(seconds, key=seconds.__getitem__)
        times = sorted(seconds.values())
        rows.append(
            DimRow(
                dim=dim,
                op=op,
                bytes=length,
                seconds=(times[0], median(times), times[-1]),
                bus=_bus(op, length, len(worst), times[-1]),
                slowest=worst,
            )
        )
    return rows


def group_rates(
    measured: Measured, layout: Layout, dim: str, length: int
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield each group of a dim with its bus bandwidth in an all_reduce of ``length`` bytes."""
    for group, seconds in _group_seconds(measured, layout)[dim, "all_reduce", length].items():
        yield group, _bus("all_reduce", length, len(group), seconds)


def _group_seconds(
    measured: Measured, layout: Layout
) -> dict[tuple[str, Op, int], dict[tuple[int, ...], float]]:
    """Return the time of each group's slowest rank, by dim, operation and size."""
    by_rank: dict[tuple[str, Op, int], dict[int, float]] = {}
    for rank in measured.ranks:
        for each in rank.collectives:
            by_rank.setdefault((each.dim, each.op, each.bytes), {})[rank.rank] = each.seconds
    found: dict[tuple[str, Op, int], dict[tuple[int, ...], float]] = {}
    for key, seconds in by_rank.items():
        groups = layout.groups(layout.dim_labels.index(key[0]))
        found[key] = {tuple(group): max(seconds[rank] for rank in group) for group in groups}
    return found


def _bus(op: Op, length: int, members: int, seconds: float) -> float:
    return BUS_FACTOR[op] * length * (members - 1) / members / seconds


def best_bus(rows: Iterable[DimRow]) -> dict[str, float]:
    """Return the best bandwidth of all_reduce in each dim over all sizes."""
    found: dict[str, float] = {}
    for row in rows:
        if row.op == "all_reduce":
            found[row.dim] = max(found.get(row.dim, 0.0), row.bus)
    return found


def _unmet(requirements: Sequence[Requirement], rows: Sequence[DimRow]) -> Iterator[Finding]:
    best = best_bus(rows)
    for required in requirements:
        dim, bus = required.dim, best.get(required.dim)
        if bus is not None and bus < required.bus:
            worst = max((row for row in rows if row.dim == dim), key=lambda row: row.bytes)
            yield Finding(
                text=f"{required.text} is not met: the slowest group of {dim} has"
                f" {format_rate(bus)}, ranks {_ranks(worst.slowest)}"
            )


def failed_hosts(findings: Iterable[Finding]) -> dict[str, str]:
    """Return the hosts to leave out, each with the most severe reason."""
    failed: dict[str, str] = {}
    for finding in findings:
        for host in finding.hosts:
            failed.setdefault(host, finding.text)
    return failed


def _differing(ranks: Sequence[RankMeasures]) -> Iterator[Finding]:
    for name in ranks[0].facts:
        by_value: dict[str, list[RankMeasures]] = {}
        for rank in ranks:
            by_value.setdefault(rank.facts.get(name, "none"), []).append(rank)
        usual = max(by_value, key=lambda value: len(by_value[value]))
        for value, others in by_value.items():
            if value != usual:
                hosts = tuple(dict.fromkeys(rank.host for rank in others))
                yield Finding(
                    text=f"{name} is {value} on {', '.join(hosts)}, and {usual} elsewhere",
                    hosts=hosts,
                )
    for host, ahead_s in {rank.host: rank.clock_s for rank in ranks}.items():
        if abs(ahead_s) > _CLOCKS_S:
            word = "ahead of" if ahead_s > 0 else "behind"
            yield Finding(text=f"the clock of {host} is {abs(ahead_s):.1f} s {word} rank 0's")


def _paths(ranks: Sequence[RankMeasures]) -> Iterator[Finding]:
    hosts_with: dict[tuple[str, str], list[str]] = {}
    for rank in ranks:
        for path, problem in rank.paths.items():
            if problem:
                hosts_with.setdefault((path, problem), []).append(rank.host)
    for (path, problem), found in hosts_with.items():
        hosts = tuple(dict.fromkeys(found))
        yield Finding(text=f"`{path}` on {', '.join(hosts)}: {problem}", hosts=hosts)


def _slow_products(ranks: Sequence[RankMeasures]) -> Iterator[Finding]:
    rates = [rank.gflops for rank in ranks]
    for index in slow_ranks(rates):
        rank = ranks[index]
        yield Finding(
            text=f"rank {rank.rank} on {rank.host} multiplies matrices at"
            f" {rank.gflops:.0f} GFLOPS; the median is {median(rates):.0f}",
            hosts=(rank.host,),
        )


def slow_ranks(rates: Sequence[float]) -> list[int]:
    """Return the ranks, as indices into ``rates``, with less than half of the median."""
    usual = median(rates)
    return [rank for rank, rate in enumerate(rates) if rate * SLOW < usual]


def _link_rates(measured: Measured, layout: Layout) -> LinkRates:
    """Return the bandwidth of each link between nodes, or between ranks if there is one node."""
    many_nodes = layout.nnodes > 1
    rates: dict[frozenset[int], float] = {}
    for rank in measured.ranks:
        for each in rank.exchanges:
            ends = (rank.rank, each.peer)
            pair = frozenset(layout.node_rank(end) if many_nodes else end for end in ends)
            rates[pair] = min(rates.get(pair, float("inf")), each.bytes / each.seconds)
    usual, slow = compare_links(rates)
    return LinkRates(rates=rates, usual=usual, slow=frozenset() if measured.shares_cores else slow)


def compare_links(
    rates: Mapping[frozenset[int], float],
) -> tuple[float, frozenset[frozenset[int]]]:
    """Return the usual bandwidth, and the links with less than half of it."""
    # The upper quartile: with few nodes, half of all links may be those of a bad node.
    usual = sorted(rates.values())[len(rates) * 3 // 4] if rates else 0.0
    return usual, frozenset(pair for pair, rate in rates.items() if rate * SLOW < usual)


def _slow_links(
    ranks: Sequence[RankMeasures], layout: Layout, found: LinkRates
) -> Iterator[Finding]:
    """Find bad nodes, all of whose links are slow, and bad links between good nodes."""
    hosts = {rank.rank: rank.host for rank in ranks}
    many_nodes = layout.nnodes > 1
    rates, usual, slow = found.rates, found.usual, found.slow
    if len(rates) < 2:
        return

    def name(unit: int) -> str:
        return hosts[layout.rank_at(unit, 0)] if many_nodes else f"rank {unit}"

    bad = found.bad_ends
    for unit in bad:
        best = max(rate for pair, rate in rates.items() if unit in pair)
        yield Finding(
            text=f"all links of {name(unit)} are slow: {format_rate(best)} at best, while"
            f" the others have {format_rate(usual)}",
            hosts=(hosts[layout.rank_at(unit, 0) if many_nodes else unit],),
        )
    for pair in sorted(slow, key=sorted):
        if pair.isdisjoint(bad):
            one, other = sorted(pair)
            yield Finding(
                text=f"the link between {name(one)} and {name(other)} is slow:"
                f" {format_rate(rates[pair])}, while the others have {format_rate(usual)}"
            )


def _slow_groups(rows: Sequence[DimRow]) -> Iterator[Finding]:
    largest = {(row.dim, row.op): row for row in rows}
    for row in largest.values():
        _, middle, most = row.seconds
        if most > SLOW * middle:
            yield Finding(
                text=f"{row.op} of {format_size(row.bytes)} takes {most * 1e3:.1f} ms in the group"
                f" of {row.dim} with ranks {_ranks(row.slowest)}, {middle * 1e3:.1f} ms in others"
            )


def _too_little_memory(ranks: Sequence[RankMeasures]) -> Iterator[Finding]:
    small = {r.host: r.shm_bytes for r in ranks if r.shm_bytes is not None}
    for host, found in small.items():
        if found < _SMALL_SHM:
            text = f"{host} has {size(found)} of shared memory; a container needs --shm-size"
            yield Finding(text=text)
    for rank in ranks:
        free, whole = rank.gpu_free_bytes, rank.gpu_bytes
        if free is not None and whole and free < _FREE_GPU * whole:
            yield Finding(
                text=f"the GPU of rank {rank.rank} on {rank.host} has {size(free)} of"
                f" {size(whole)} free"
            )


def _ranks(group: Sequence[int]) -> str:
    return listed(group, rest=f" and {count(len(group) - 8, 'other')}")


def format_rate(rate: float) -> str:
    """Return a bandwidth in words: ``37.2 GB/s``, ``512 MB/s``."""
    for unit, name, digits in ((1e9, "GB/s", 1), (1e6, "MB/s", 0), (1e3, "kB/s", 0)):
        if rate >= unit:
            return f"{rate / unit:.{digits}f} {name}"
    return f"{rate:.0f} B/s"


def format_size(number: int) -> str:
    """Return the size of a buffer in words: ``1 KiB``, ``256 MiB``."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if number >= unit:
            return f"{number // unit} {name}"
    return f"{number} B"
