"""Wording that depends on a number, and the address of the documentation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

DOCS = "https://meshrun.readthedocs.io/en/stable"
_ES = ("s", "x", "ch", "sh")


def count(number: int, noun: str) -> str:
    """Return ``1 rank``, ``2 ranks``, ``1,024 processes``."""
    return f"{number:,} {noun}{plural(number, 'es' if noun.endswith(_ES) else 's')}"


def flag_of(name: str) -> str:
    """Return the option of an attribute, or of a variable without its family."""
    return f"--{name.lower().replace('_', '-')}"


def size(number: int) -> str:
    """Return a number of bytes: ``512 MiB``, ``41.2 GiB``."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """Return a duration: ``10 min``, ``90 s``."""
    return f"{seconds / 60:g} min" if seconds >= 60 and seconds % 60 == 0 else f"{seconds:g} s"


def number_ranges(numbers: Iterable[int]) -> str:
    """Return ``0-2,5``, as the kernel lists CPUs."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def columns(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Return rows of cells as aligned lines, with the columns ``right`` right-justified."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def listed(values: Sequence[object], *, most: int = 8, rest: str = ", ...") -> str:
    """Return the first values, and ``rest`` if there are others: ``8, 8, 4, ...``."""
    return ", ".join(map(str, values[:most])) + rest * (len(values) > most)


def either(words: Sequence[str]) -> str:
    """Return alternatives: ``a``, ``a or b``, ``a, b or c``."""
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def quoted(names: Iterable[object]) -> str:
    """Return names as code: `` `a`, `b` ``."""
    return ", ".join(f"`{name}`" for name in names)


def use_dim(names: Iterable[object]) -> str:
    """Return the hint for a dim that the mesh lacks, or nothing if its dims have no names."""
    known = quoted(names)
    return f"use a dim of the mesh: {known}" if known else ""


def plural(number: int, ending: str = "s") -> str:
    """Return the ending of a noun after ``number``."""
    return "" if number == 1 else ending
