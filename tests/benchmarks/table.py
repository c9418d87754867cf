"""Samples -> Markdown tables with medians, extremes and ratios. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

Samples = dict[str, list[float | None]]
"""Command -> its result in each round, in order; ``None`` for a failed run."""


def render_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a titled Markdown table, its first column left-aligned and the others right."""
    alignment = ["---", *["---:"] * (len(header) - 1)]
    lines = [f"| {' | '.join(row)} |" for row in (header, alignment, *rows)]
    return "\n".join([f"## {title}", "", *lines, ""])


def render_samples(title: str, unit: str, samples: Samples, *, digits: int = 2) -> str:
    """Return a table of medians that compares every command with the first."""
    baseline = next(iter(samples))
    header = ("command", f"median, {unit}", "min", "max", "runs", f"ratio to {baseline}")
    rows = []
    for name, values in samples.items():
        good = [value for value in values if value is not None]
        runs = str(len(values)) if len(good) == len(values) else f"{len(good)} of {len(values)} ok"
        figures = (median(good), min(good), max(good)) if good else ()
        shown = [f"{figure:.{digits}f}" for figure in figures] or ["-"] * 3
        ratio = "1" if name == baseline else _show_ratio(values, samples[baseline])
        rows.append((name, *shown, runs, ratio))
    return render_table(title, header, rows)


def _show_ratio(values: Sequence[float | None], baseline: Sequence[float | None]) -> str:
    """Return the median of the per-round ratios.

    Noise comes in bursts that affect neighbouring runs alike, so it mostly cancels out in pairs.
    """
    ratios = [
        value / other
        for value, other in zip(values, baseline, strict=False)
        if value is not None and other
    ]
    return f"{median(ratios):.2f}" if ratios else "-"
