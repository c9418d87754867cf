"""The bandwidths that ``--require`` requires of the dims of a mesh. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

from meshrun.errors import UsageError
from meshrun.wording import use_dim

_REQUIREMENT = re.compile(r"(?P<dim>[\w+]+)\s*>=\s*(?P<number>\d+(\.\d+)?)\s*(?P<unit>[MG]B/s)")
_UNITS = {"MB/s": 1e6, "GB/s": 1e9}


class Requirement(Struct, frozen=True, kw_only=True):
    """The minimum bandwidth that the groups of a dim must have."""

    dim: str
    bus: float
    """Bus bandwidth in bytes per second."""
    text: str
    """The requirement as the user wrote it."""


def parse_requirements(text: str, what: str) -> tuple[Requirement, ...]:
    """Return the requirements in ``tp>=300GB/s,dp>=40GB/s``.

    Raises:
        UsageError: If it is not such a list.
    """
    found = []
    for part in text.split(","):
        match = _REQUIREMENT.fullmatch(part.strip())
        if match is None:
            raise UsageError(
                f"cannot parse {what} `{part}`",
                hint="write dims and bandwidths, such as tp>=300GB/s,dp>=500MB/s",
            )
        bus = float(match["number"]) * _UNITS[match["unit"]]
        found.append(Requirement(dim=match["dim"], bus=bus, text=part.strip()))
    return tuple(found)


def check_dims(requirements: Sequence[Requirement], dims: Sequence[str]) -> None:
    """Check that the mesh has the dims of all requirements.

    Raises:
        UsageError: If it does not.
    """
    for required in requirements:
        if required.dim not in dims:
            raise UsageError(
                f"--require {required.text}: the mesh has no dim `{required.dim}`",
                hint=use_dim(dims) or "name its dims, as in --mesh dp=2,tp=4",
            )
