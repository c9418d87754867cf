"""How the GPUs of a machine are joined to each other and to its network cards. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Ways over PCI, the nearest first, as ``nvidia-smi topo`` calls them."""
NEARNESS = ("same switch", "same root", "same NUMA node", "another NUMA node")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLinks:
    """Links between the GPUs that a launch sees, by local index."""

    pairs: tuple[tuple[str, ...], ...]
    """``pairs[i][j]`` is ``NV18`` for 18 NVLinks, one of ``LEVELS``, ``X`` for i == j, or ``?``."""
    nics: tuple[tuple[str, str] | None, ...]
    """Nearest network card of each GPU and how near it is, or ``None`` if there is none."""

    def weakest(self, devices: Sequence[int]) -> str | None:
        """Return the slowest link between any two of some GPUs; ``None`` for fewer than two."""
        count = len(self.pairs)
        here = [device for device in devices if device < count]
        return self.weakest_of(
            [self.pairs[first][second] for first, second in combinations(here, 2)]
        )

    @staticmethod
    def weakest_of(links: Sequence[str]) -> str | None:
        """Return the slowest of some links."""
        return min(links, key=_strength, default=None)


def _strength(link: str) -> int:
    if link.startswith("NV"):
        return 100 + int(link[2:])
    return -LEVELS.index(link) if link in LEVELS else -len(LEVELS)
