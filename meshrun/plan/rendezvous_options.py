"""The backends of a rendezvous and its settings: names, defaults and meanings. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from msgspec import Struct

from meshrun.plan.parse import parse_flag, parse_seconds, parse_settings

DEFAULT_PORT = 29500
"""torchrun's default."""
STATIC, C10D = "static", "c10d"
"""The backends without torch's rendezvous."""
BACKENDS = {STATIC: DEFAULT_PORT, C10D: 29400, "etcd": 2379, "etcd-v2": 2379}
"""The port of each backend's endpoint that names none."""
FLAG = "--rdzv-conf"
_T = TypeVar("_T")


class Setting(Struct, Generic[_T], frozen=True):
    """A setting that meshrun reads; its name and default are torch's."""

    names: tuple[str, ...]
    """Its name, and others that torch accepts for it."""
    parse: Callable[[str, str], _T]
    default: _T
    meaning: str

    def read(self, given: Mapping[str, str]) -> _T:
        """Return its value in the given settings, or the default.

        Raises:
            UsageError: If it cannot be parsed.
        """
        for name in self.names:
            if text := given.get(name):
                return self.parse(text, f"{FLAG} {name}")
        return self.default

    def __str__(self) -> str:
        default = self.default
        shown = f"{default:g}" if isinstance(default, float) else default
        value = "" if shown is None else f", {shown}"
        return f"{' or '.join(f'`{name}`' for name in self.names)}: {self.meaning}{value}"


JOIN = Setting(("join_timeout", "timeout"), parse_seconds, 600.0, "how long to wait for all nodes")
LAST_CALL = Setting(
    ("last_call_timeout",), parse_seconds, 30.0, "how long to wait for more than the minimum"
)
IS_HOST = Setting[bool | None](
    ("is_host",), parse_flag, None, "whether this node is node 0 of c10d"
)
STORE_TYPE = Setting(
    ("store_type",), lambda text, _: text.strip().lower(), "tcp", "the kind of c10d's store"
)
SETTINGS: tuple[Setting[Any], ...] = (JOIN, LAST_CALL, IS_HOST, STORE_TYPE)

_TIMES = frozenset(
    {"close_timeout", "read_timeout", "heartbeat_timeout", "keep_alive_interval"}
    | {name for row in SETTINGS if row.parse is parse_seconds for name in row.names}
)
"""Settings that are durations, with those that only torch reads."""


def parse_rendezvous_settings(text: str, flag: str) -> tuple[tuple[str, str], ...]:
    """Return the settings of a rendezvous; durations become whole seconds, as torch expects."""
    return tuple(
        (key, str(math.ceil(parse_seconds(value, f"{flag} {key}"))))
        if key in _TIMES and not value.isdigit()
        else (key, value)
        for key, value in parse_settings(text, flag)
    )
