"""Parsers of option and variable values: numbers, signals, streams, lists. Pure."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Sequence
from difflib import get_close_matches
from ipaddress import IPv6Address

from msgspec import Struct

from meshrun.errors import UsageError
from meshrun.plan.device import TYPES
from meshrun.wording import either

LONGEST_S = 10_000_000.0
GPU_WAIT_S = 50.0
_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]+)?) *([kmgt]i?b?)", re.IGNORECASE)
_UNITS_BYTES = {
    f"{unit}{ending}": base**power
    for power, unit in enumerate("kmgt", 1)
    for ending, base in (("", 1024), ("i", 1024), ("ib", 1024), ("b", 1000))
}
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TIME_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_TIME_PARTS = re.compile(rf"(?:{_TIME_PART.pattern})+")
_TRUE = frozenset({"1", "true", "yes", "on", "y", "t"})
_FALSE = frozenset({"0", "false", "no", "off", "n", "f", ""})
COUNT_WORDS = ("auto", "gpu", "cpu", "xpu")
_TIMES = "write seconds, or numbers with ms, s, m, h or d: `90`, `90s`, `5m`, `1h30m`"
_STREAMS = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?:([0-3])")
_LOCAL_RANKS = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
"""No node has a million workers, and a longer number could fill the memory."""


class GpuMemoryWait(Struct, frozen=True, kw_only=True):
    """How long a restart waits for GPU memory to be freed."""

    limit_bytes: int
    """How much may be in use on each GPU."""
    timeout_s: float


def parse_integer(text: str, what: str, *, least: int = 0, most: int | None = None) -> int:
    """Return ``text`` as a whole number within bounds.

    Raises:
        UsageError: If it is not one.
    """
    bounds = f"from {least} to {most:,}" if most is not None else f"of at least {least}"
    try:
        number = int(text.strip())
    except ValueError:
        number = least - 1
    if number < least or (most is not None and number > most):
        raise UsageError(f"{what} expects a whole number {bounds}, found `{text}`")
    return number


def parse_seconds(text: str, what: str, *, least: float = 0.0, most: float = LONGEST_S) -> float:
    """Return a duration in seconds: ``30``, ``30s``, ``500ms``, ``5m``, ``1.5h`` or ``1h30m``.

    Raises:
        UsageError: If ``text`` is not a duration within bounds.
    """
    word = text.strip()
    try:
        seconds = float(word)
    except ValueError:
        if not _TIME_PARTS.fullmatch(word):
            raise UsageError(f"{what} expects a time, found `{text}`", hint=_TIMES) from None
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in _TIME_PART.findall(word))
    if not least <= seconds <= most:
        bounds = f"{least:g} and {most:,.0f} seconds"
        raise UsageError(f"{what} must be between {bounds}, found `{text}`", hint=_TIMES)
    return seconds


def parse_gpu_memory_wait(text: str, what: str) -> GpuMemoryWait:
    """Return how much memory may be in use, and how long to wait: ``512MiB,50s``.

    Raises:
        UsageError: If ``text`` is neither a size nor a size and a time.
    """
    memory, comma, time = text.partition(",")
    found = _SIZE.fullmatch(memory.strip())
    if found is None:
        raise UsageError(
            f"{what} expects a size and a time, found `{text}`",
            hint="for example: 512MiB,50s; sizes end in MiB, GiB, MB or GB",
        )
    return GpuMemoryWait(
        limit_bytes=int(float(found[1]) * _UNITS_BYTES[found[2].lower()]),
        timeout_s=parse_seconds(time, what) if comma else GPU_WAIT_S,
    )


def parse_flag(text: str, what: str) -> bool:
    """Return whether ``text`` is true: ``true``, ``1``, ``yes`` or ``on``, in any case.

    Raises:
        UsageError: If it is neither true nor false.
    """
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise UsageError(f"{what} must be true or false, 1 or 0, found `{text}`")
    return word in _TRUE


def is_on(text: str | None, *, unset: bool = False) -> bool:
    """Return whether a value that :func:`parse_flag` accepts is true; ``unset`` if it is empty."""
    return unset if text is None or not text.strip() else text.strip().lower() in _TRUE


def parse_choice(text: str, what: str, choices: Sequence[str]) -> str:
    """Return ``text`` if it is one of ``choices``.

    Raises:
        UsageError: If it is not; suggests the nearest choice.
    """
    if text in choices:
        return text
    near = get_close_matches(text, choices, n=1, cutoff=0.6)
    raise UsageError(
        f"{what} must be {either(choices)}, found `{text}`",
        hint=f"did you mean `{near[0]}`?" if near else None,
    )


def split_words(text: str, what: str) -> list[str]:
    """Return the words of ``text``, split as by a shell.

    Raises:
        UsageError: If a quotation is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{what} cannot read `{text}`: {error}") from None


def parse_nnodes(text: str, what: str) -> tuple[int, int]:
    """Return the minimum and maximum number of nodes of ``4`` or ``2:4``.

    Raises:
        UsageError: If ``text`` is not such a number or range.
    """
    least, colon, most = text.partition(":")
    try:
        first = parse_integer(least, what, least=1)
        last = parse_integer(most, what, least=1) if colon else first
    except UsageError as error:
        raise UsageError(
            f"{what} expects a number of at least 1, or MIN:MAX, found `{text}`"
        ) from error
    if last < first:
        raise UsageError(f"{what} MIN:MAX requires MIN <= MAX, found `{text}`")
    return first, last


def format_nnodes(least: int | None, most: int) -> str:
    """Return the value of ``--nnodes``: ``4``, or ``2:4`` if there is a minimum."""
    return str(most) if least is None else f"{least}:{most}"


def parse_workers(text: str, what: str) -> int | tuple[int, ...] | str:
    """Return a number of workers, one number per node, or the kind of device to count.

    Raises:
        UsageError: If ``text`` is neither numbers of at least 1 nor a word.
    """
    word = text.strip()
    if "," in word:
        counts = word.split(",")
        return tuple(parse_integer(count, what, least=1) for count in counts)
    if word.replace("_", "").isalpha():
        if word in (*COUNT_WORDS, *TYPES) or not get_close_matches(word, COUNT_WORDS, cutoff=0.6):
            return word
        return parse_choice(word, what, COUNT_WORDS)
    try:
        return parse_integer(word, what, least=1)
    except UsageError as error:
        words = either(COUNT_WORDS)
        error.hint = f"use a number, {words}, or a list such as 8,4 if nodes differ"
        raise


def parse_signals(text: str, what: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the signals in ``SIGTERM,USR1,FOO``, in order, and the unknown names.

    Raises:
        UsageError: If a signal cannot be caught.
    """
    signums: list[int] = []
    unknown = []
    for part in filter(None, map(str.strip, text.split(","))):
        name = part.upper()
        name = name if name.startswith("SIG") else f"SIG{name}"
        signum = signal.Signals.__members__.get(name)
        if signum in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            raise UsageError(f"{what}: no process can handle {name}")
        if signum is None:
            unknown.append(part)
        elif signum not in signums:
            signums.append(signum)
    return tuple(signums), tuple(unknown)


def unknown_signal(name: str) -> str:
    """Return the message for an unknown signal, with a suggestion."""
    full = f"SIG{name.upper().removeprefix('SIG')}"
    near = get_close_matches(full, signal.Signals.__members__, n=1, cutoff=0.75)
    return f"unknown signal `{name}`" + (f" (did you mean `{near[0]}`?)" if near else "")


class Streams(Struct, frozen=True):
    """The streams of each local rank: 0 none, 1 stdout, 2 stderr, 3 both."""

    everywhere: int = 0
    of_ranks: tuple[tuple[int, int, int], ...] = ()
    """(first local rank, last local rank, streams); later entries override earlier ones."""

    def of(self, local_rank: int) -> int:
        """Return the streams of one local rank."""
        for first, last, streams in reversed(self.of_ranks):
            if first <= local_rank <= last:
                return streams
        return self.everywhere

    def __bool__(self) -> bool:
        return bool(self.everywhere) or any(streams for _, _, streams in self.of_ranks)


NO_STREAMS = Streams()


def parse_streams(text: str, what: str) -> Streams:
    """Return the streams in ``3``, or by local rank in ``0:1,1:2`` and ``0-3:1,10:3``.

    Raises:
        UsageError: If ``text`` has another form.
    """
    if text.strip() in ("0", "1", "2", "3"):
        return Streams(int(text))
    found = []
    for part in text.split(","):
        match = _STREAMS.fullmatch(part.strip())
        first, last, streams = match.groups() if match else (None, None, None)
        if match is None or (last is not None and int(last) < int(first or 0)):
            raise UsageError(
                f"cannot parse {what} `{part.strip() or text}`",
                hint=f"use 0 for none, 1 stdout, 2 stderr, 3 both: {what} 3 for all ranks, {what}"
                " 0:3,4-7:2 by local rank",
            )
        found.append((int(first or 0), int(last or first or 0), int(streams or 0)))
    return Streams(0, tuple(found))


def parse_local_ranks(text: str, what: str) -> frozenset[int] | None:
    """Return the local ranks in ``0,2-3``, or ``None`` for an empty text, which means all.

    Raises:
        UsageError: If ``text`` has another form.
    """
    if not text.strip():
        return None
    ranks: set[int] = set()
    for part in text.split(","):
        match = _LOCAL_RANKS.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"{what} expects local ranks such as 0,2-3, found `{text}`")
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(ranks)


def parse_settings(text: str, what: str) -> tuple[tuple[str, str], ...]:
    """Return the pairs in ``k=v,k=v``, which may still be in quotes that no shell removed.

    Raises:
        UsageError: If a part has no ``=``, no key or no value.
    """
    pairs = []
    text = text.strip()
    if text[:1] in ("'", '"') and text[1:].endswith(text[0]):
        text = text[1:-1]
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = part.partition("=")
        if not (key.strip() and value.strip()):
            raise UsageError(f"{what} expects key=value,key=value, found `{part}`")
        pairs.append((key.strip(), value.strip()))
    return tuple(pairs)


def _is_ipv6(text: str) -> bool:
    address, _, zone = text.partition("%")
    try:
        IPv6Address(address)
    except ValueError:
        return False
    return ":" not in zone


def parse_endpoint(text: str) -> tuple[str, int | None]:
    """Return host and port of ``host``, ``host:29500`` or ``[::1]:29500``.

    Brackets may be omitted if only one reading is an address: ``fd00::1:29500``, ``fd00::1``.

    Raises:
        UsageError: If there is no host before the port, the port is not a number up to 65535, or
            the last part could be either a port or part of the address.
    """
    host, colon, port = text.strip().rpartition(":")
    if not colon or text.strip().endswith("]"):
        return text.strip().strip("[]"), None
    if not host.strip("[]") or " " in host:
        raise UsageError(
            f"--rdzv-endpoint {text} has no valid host before the port",
            hint="write HOST:PORT; a variable for the host may be empty",
        )
    if ":" in host and not host.endswith("]"):
        is_whole, is_apart = _is_ipv6(text.strip()), _is_ipv6(host)
        if is_whole and is_apart:
            raise UsageError(
                f"--rdzv-endpoint {text} is ambiguous: an address, or an address and port {port}",
                hint=f"write [{host}]:{port} or [{text.strip()}]",
            )
        if is_whole:
            return text.strip(), None
    try:
        return host.strip("[]"), parse_integer(port, "the port of --rdzv-endpoint", most=65535)
    except UsageError as error:
        error.hint = f"write HOST:PORT, instead of `{text}`"
        raise
