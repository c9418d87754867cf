"""Options of process groups: backends, timeouts, ``--pg-opt``, as text and as values. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from difflib import get_close_matches

from msgspec import Struct

from meshrun.errors import UsageError
from meshrun.host import rank_variables as var
from meshrun.layout.spec import split_texts
from meshrun.plan.parse import parse_seconds
from meshrun.wording import use_dim

_SHORTEST_S, _LONGEST_S = 0.001, 1e9
_ONLY_FOR = {"nccl": "cuda", "xccl": "xpu"}
"""Backends that support a single device type."""
_BACKENDS = ("gloo", "mpi", "ucc", "fake", *_ONLY_FOR, "cncl", "smddp")
"""torch's own backends, and some of those that packages add; most of the latter end in `ccl`."""
_VARIABLES = (var.BACKEND, var.TIMEOUT, var.PG_OPT)
_BACKEND = re.compile(r"[a-z][a-z0-9_]*(?::[a-z][a-z0-9_]*)?(?:,[a-z]\w*:[a-z]\w*)*")


class GroupOptions(Struct, frozen=True, kw_only=True):
    """Options of the process groups of dims; torch's defaults apply to all others."""

    backends: tuple[tuple[str, str], ...] = ()
    """(dim, backend), such as ``("tp", "gloo")``; the dim "" stands for all dims."""
    timeouts_s: tuple[tuple[str, float], ...] = ()
    """(dim, seconds); the dim "" stands for every group, including the default group."""
    settings: tuple[tuple[str, str, str], ...] = ()
    """(dim, option, value) for the backend's option object."""

    def backend(self, dim: str) -> str | None:
        """Return the backend of a dim's groups, or ``None`` for torch's choice."""
        given = dict(self.backends)
        return given.get(dim, given.get(""))

    def timeout(self, dim: str) -> timedelta | None:
        """Return the timeout of a dim's groups, or ``None`` for torch's default."""
        given = dict(self.timeouts_s)
        seconds = given.get(dim, given.get(""))
        return None if seconds is None else timedelta(seconds=seconds)

    def has_own(self, dim: str) -> bool:
        """Return whether a dim's groups differ from the default group."""
        return self.backend(dim) is not None or any(of == dim for of, _, _ in self.settings)

    def check_backends(self, device_type: str | None) -> None:
        """Check that the backends exist and support the mesh's device.

        Raises:
            UsageError: If one does not; suggests one that does.
        """
        for dim, text in self.backends:
            parts = (part.rpartition(":") for part in text.split(","))
            names = [backend for device, _, backend in parts if device in ("", device_type)]
            for backend in names:
                is_known = backend in _BACKENDS or backend.endswith("ccl")
                if not is_known and (near := get_close_matches(backend, _BACKENDS, n=1)):
                    hint = f"did you mean `{near[0]}`?"
                    raise UsageError(f"--backend: unknown backend `{backend}`", hint=hint)
                if _ONLY_FOR.get(backend, device_type) != device_type:
                    fits = next((b for b, d in _ONLY_FOR.items() if d == device_type), "gloo")
                    raise UsageError(
                        f"--backend {_with_dim(dim, text)}: {backend} requires"
                        f" {_ONLY_FOR[backend]}, but the mesh is on {device_type}",
                        hint=f"use --backend {_with_dim(dim, fits)}, or remove it",
                    )

    @property
    def backend_names(self) -> list[str]:
        """Every backend named, for any dim and device."""
        parts = (part for _, text in self.backends for part in text.split(","))
        return list(dict.fromkeys(part.rpartition(":")[2] for part in parts))

    def check_dims(self, known: Iterable[str]) -> None:
        """Check that the mesh has each dim named.

        Raises:
            UsageError: If a dim is missing; lists the dims of the mesh.
        """
        names = list(known)
        for option, dims in (
            ("--backend", [dim for dim, _ in self.backends]),
            ("--timeout", [dim for dim, _ in self.timeouts_s]),
            ("--pg-opt", [dim for dim, _, _ in self.settings]),
        ):
            for dim in dims:
                if dim and dim not in names:
                    hint = use_dim(names) or "set --mesh"
                    raise UsageError(f"{option}: the mesh has no dim `{dim}`", hint=hint)


def parse_group_options(
    backends: str | Iterable[str], timeouts: str | Iterable[str], settings: str | Iterable[str]
) -> GroupOptions:
    """Return the values of ``--backend``, ``--timeout`` and ``--pg-opt``, each given repeatedly.

    Args:
        backends: ``tp=gloo``, or ``gloo`` for all dims.
        timeouts: ``15m`` for every group, or ``tp=2m``.
        settings: ``tp:is_high_priority_stream=1``, several separated by commas.

    Raises:
        UsageError: If one cannot be parsed.
    """
    return GroupOptions(
        backends=tuple(_parse_backend(text) for text in split_texts(backends)),
        timeouts_s=tuple(_parse_timeout(text) for text in split_texts(timeouts)),
        settings=tuple(part for text in split_texts(settings) for part in _parse_settings(text)),
    )


def format_group_options(options: GroupOptions) -> dict[str, str]:
    """Return the options as variables, for :func:`read_group_options`."""
    texts = (
        [_with_dim(dim, backend) for dim, backend in options.backends],
        [_with_dim(dim, f"{seconds}s".replace(".0s", "s")) for dim, seconds in options.timeouts_s],
        [f"{dim}:{name}={value}" for dim, name, value in options.settings],
    )
    pairs = zip(_VARIABLES, texts, strict=True)
    return {name: ";".join(parts) for name, parts in pairs if parts}


def read_group_options(env: Mapping[str, str]) -> GroupOptions:
    """Return the options that an environment describes.

    Raises:
        UsageError: If they cannot be parsed.
    """
    return parse_group_options(*(env.get(name, "") for name in _VARIABLES))


def _with_dim(dim: str, text: str) -> str:
    return f"{dim}={text}" if dim else text


def _parse_backend(text: str) -> tuple[str, str]:
    dim, equals, backend = text.rpartition("=")
    if not _BACKEND.fullmatch(backend) or (equals and not dim):
        raise UsageError(
            f"--backend cannot read `{text}`",
            hint="use --backend gloo for all dims, or --backend tp=nccl for one",
        )
    return dim, backend


def _parse_timeout(text: str) -> tuple[str, float]:
    dim, equals, duration = text.rpartition("=")
    if equals and not dim:
        raise UsageError(
            f"--timeout cannot read `{text}`",
            hint="use --timeout 15m for every group, or --timeout tp=90s for those of a dim",
        )
    return dim, parse_seconds(duration, "--timeout", least=_SHORTEST_S, most=_LONGEST_S)


def _parse_settings(text: str) -> list[tuple[str, str, str]]:
    dim, colon, pairs = text.partition(":")
    found = []
    for pair in pairs.split(","):
        name, equals, value = pair.partition("=")
        if not (dim and colon and name.strip() and equals):
            raise UsageError(
                f"--pg-opt cannot read `{text}`",
                hint="for example: --pg-opt tp:is_high_priority_stream=1",
            )
        found.append((dim.strip(), name.strip(), value.strip()))
    return found
