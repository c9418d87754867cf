"""The hosts of a launch, from ``--hosts``, a hostfile, ``--include`` and ``--exclude``. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from meshrun.errors import UsageError
from meshrun.wording import count, listed

_USER = r"(?:(?P<user>[\w.][\w.\\-]*)@)?"
_NAME = re.compile(_USER + r"(?P<host>\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|\w[\w.-]*)")
_MOST_SLOTS = 1_000_000
_KEYS = ("slots", "max_slots", "max-slots")


class Host(Struct, frozen=True):
    """One host, which is one node of the launch."""

    destination: str
    """ssh's destination: ``host`` or ``user@host``, an IPv6 address without brackets."""
    slots: int | None = None
    """Number of workers it may have; ``None`` if unknown."""
    chosen: tuple[int, ...] | None = None
    """The slots in use; ``None`` for all."""

    @property
    def name(self) -> str:
        """The host without the user."""
        return self.destination.rpartition("@")[2]

    @property
    def workers(self) -> int | None:
        """Number of slots in use, if known."""
        return self.slots if self.chosen is None else len(self.chosen)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts in ``a,b:4,user@c``.

    Raises:
        UsageError: If one cannot be parsed or is listed twice.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UsageError("--hosts lists no host", hint="use --hosts a,b or --hosts a:8,b:8")
    hosts: dict[str, Host] = {}
    for part in parts:
        _add(hosts, _read_host(part, "--hosts"), "--hosts")
    return tuple(hosts.values())


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Return the hosts of a file in the format of DeepSpeed or Open MPI, one per line.

    ``host slots=8``, ``host slots=8 max_slots=8``, ``host:8`` or ``host``; ``#`` begins a comment.

    Raises:
        UsageError: If a line cannot be parsed or repeats a host.
    """
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if words := line.partition("#")[0].split():
            _add(hosts, _read_line(words, where := f"{path}, line {number}"), where)
    if not hosts:
        raise UsageError(f"{path} lists no host", hint="list one host per line: host slots=8")
    return tuple(hosts.values())


def is_host(name: str) -> bool:
    """Return whether a text is the name or the address of a host, and not an option of ssh."""
    return _NAME.fullmatch(f"[{name}]" if ":" in name else name) is not None


def choose_hosts(
    hosts: Sequence[Host], *, include: str | None = None, exclude: str | None = None
) -> tuple[Host, ...]:
    """Return the hosts that ``--include`` names or ``--exclude`` leaves, in order.

    Both use DeepSpeed's format: ``a@b:0,2`` means all of ``a``, and slots 0 and 2 of ``b``.

    Raises:
        UsageError: If both are given, one cannot be parsed or names an unknown host or slot, or no
            host is left.
    """
    if include and exclude:
        raise UsageError("--include cannot be used with --exclude")
    if include:
        named = _named(include, "--include", hosts)
        return tuple(replace(host, chosen=named[host.name]) for host in hosts if host.name in named)
    if not exclude:
        return tuple(hosts)
    named = _named(exclude, "--exclude", hosts)
    left = tuple(kept for host in hosts if (kept := _without(host, named)) is not None)
    if not left:
        raise UsageError(f"--exclude {exclude} leaves 0 of {count(len(hosts), 'host')}")
    return left


def _read_line(words: Sequence[str], where: str) -> Host:
    host = _read_host(words[0], where)
    most = None
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in _KEYS:
            raise UsageError(f"{where}: cannot read `{word}`", hint="write `host slots=8`")
        if key == "slots":
            host = replace(host, slots=_count(value, where, word))
        else:
            most = _count(value, where, word)
    if most is not None and host.slots is not None and host.slots > most:
        raise UsageError(f"{where}: {host.name} has {host.slots} slots, but max_slots is {most}")
    return host


def _read_host(text: str, where: str) -> Host:
    match = _NAME.match(text)
    rest = text[match.end() :] if match else text
    if match is None or (rest and not rest.startswith(":")):
        raise UsageError(
            f"{where}: `{text}` is not a host",
            hint="write host, user@host or host:8 for 8 slots, and an IPv6 address as [fd00::1]",
        )
    user, host = match["user"], match["host"].strip("[]")
    slots = _count(rest[1:], where, text) if rest else None
    return Host(f"{user}@{host}" if user else host, slots)


def _count(text: str, where: str, word: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= _MOST_SLOTS):
        raise UsageError(
            f"{where}: the number of slots must be a whole number of at least 1, found `{word}`",
            hint="write host:8 for 8 slots; set another sshd port in the ssh config",
        )
    return int(text)


def _add(hosts: dict[str, Host], host: Host, where: str) -> None:
    if host.name in hosts:
        raise UsageError(
            f"{where}: {host.name} is listed twice",
            hint=f"use {host.name}:8 to run 8 workers on it",
        )
    hosts[host.name] = host


def _named(text: str, what: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...] | None]:
    """Return the slots of each host in ``a@b:0,2``, ``None`` for all."""
    known = {host.name: host for host in hosts}
    found: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        name, slots = _split_slots(part.strip())
        if name not in known:
            raise UsageError(
                f"{what}: unknown host `{name}`",
                hint=f"the hosts are {listed([*known])}",
            )
        if name in found:
            raise UsageError(f"{what}: {name} is listed twice", hint=f"{name}:0,1")
        found[name] = None if slots is None else _numbers(slots, what, known[name])
    return found


def _split_slots(part: str) -> tuple[str, str | None]:
    if part.startswith("["):
        name, _, rest = part[1:].partition("]")
        return name, rest[1:] if rest.startswith(":") else None
    name, colon, slots = part.partition(":")
    return name, slots if colon else None


def _numbers(text: str, what: str, host: Host) -> tuple[int, ...]:
    numbers = []
    for part in text.split(","):
        word = part.strip()
        if not (word.isascii() and word.isdigit() and len(word) < 8):
            raise UsageError(f"{what}: slots of {host.name} must be numbers from 0, found `{word}`")
        if host.slots is not None and int(word) >= host.slots:
            raise UsageError(
                f"{what}: {host.name} has no slot {word}",
                hint=f"it has {count(host.slots, 'slot')}, numbered from 0",
            )
        numbers.append(int(word))
    return tuple(sorted(set(numbers)))


def _without(host: Host, named: dict[str, tuple[int, ...] | None]) -> Host | None:
    """Return the host with its remaining slots, ``None`` if none is left."""
    if host.name not in named:
        return host
    slots = named[host.name]
    if slots is None:
        return None
    if host.slots is None:
        raise UsageError(
            f"--exclude names slots of {host.name}, whose number of slots is unknown",
            hint=f"write {host.name}:8 if it has 8",
        )
    left = tuple(slot for slot in range(host.slots) if slot not in slots)
    return replace(host, chosen=left) if left else None
