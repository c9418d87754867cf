"""Environment variables: checks of their values, and notes on unknown names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meshrun.cli.option import Option
from meshrun.cli.options import PET, Options
from meshrun.cli.words import nearest
from meshrun.host import rank_variables as var
from meshrun.host.own_variables import BETWEEN_LAUNCHERS, SWITCHES, USER_VARIABLES
from meshrun.plan.parse import parse_flag
from meshrun.wording import flag_of

_PET_CUTOFF = 0.8
"""How similar to an option a ``PET_`` name must be: other programs use that prefix, too."""
_SERVICE = "_SERVICE_HOST"


def check_variables(options: Options) -> None:
    """Parse every variable that is set, even if its value is not used.

    Raises:
        UsageError: If a value is invalid; names the variable and the text.
    """
    for row in options.rows():
        if options.in_variable(row):
            options.value(row)
    for name in SWITCHES:
        parse_flag(options.env.get(name, ""), name)


def unknown_variables(env: Mapping[str, str]) -> Iterator[str]:
    """Yield a note for each variable that looks like one of meshrun's but is unknown.

    A launch inside a rank yields none, as the outer launch has reported them.
    """
    if var.GENERATION in env:
        return
    rows = Options.rows()
    known = {*(row.variable for row in rows), *USER_VARIABLES, *BETWEEN_LAUNCHERS}
    unknown = sorted(
        name for name in env if name.startswith(("MESHRUN_", "PET_")) and name not in known
    )
    if not unknown:
        return
    # Kubernetes sets some in each pod for a service, such as one named meshrun.
    services = [name.removesuffix(_SERVICE) for name in unknown if name.endswith(_SERVICE)]
    starts = tuple(f"{service}_{end}" for service in services for end in ("SERVICE_", "PORT"))
    for name in unknown:
        suggestion = _suggestion(name, rows)
        if not name.startswith(starts) and (suggestion or not name.startswith(PET)):
            yield f"unknown environment variable {name}{suggestion}"


def _suggestion(name: str, rows: Sequence[Option[object]]) -> str:
    """Return what to set or to type instead, if anything is similar."""
    family, _, rest = name.partition("_")
    if family == PET:
        instead = {row.flag: row.variable for row in rows if row.variable}
    else:
        instead = {row.flag: row.variable or row.flag for row in rows}
        instead |= {flag_of(other.partition("_")[2]): other for other in USER_VARIABLES}
    near = nearest(flag_of(rest), instead, most=1, cutoff=_PET_CUTOFF if family == PET else 0.7)
    if not near:
        return ""
    if instead[near[0]] == near[0]:
        return f"; {near[0]} has no variable, pass it on the command line"
    return f"; did you mean {instead[near[0]]}?"
