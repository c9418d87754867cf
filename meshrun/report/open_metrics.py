"""Metrics as text for Prometheus: OpenMetrics 1.0, or the older text format 0.0.4. Pure.

Source:
    https://prometheus.io/docs/specs/om/open_metrics_spec/
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from msgspec import Struct

OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PLAIN = "text/plain; version=0.0.4; charset=utf-8"

Sample = tuple[Mapping[str, object], float]
"""Labels and a value."""


class Family(Struct, frozen=True):
    """One metric with all its samples."""

    name: str
    """For a counter, without ``_total``."""
    help: str
    value: float | tuple[Sample, ...]
    """One value without labels, or samples."""
    kind: Literal["gauge", "counter"] = "gauge"


def render_metrics(families: Iterable[Family], *, is_open: bool) -> str:
    """Return the metrics as OpenMetrics if ``is_open``, else in the older format."""
    return "".join(f"{line}\n" for line in _lines(families, is_open))


def _lines(families: Iterable[Family], is_open: bool) -> Iterator[str]:
    for family in families:
        sample = f"{family.name}_total" if family.kind == "counter" else family.name
        name = family.name if is_open else sample
        yield f"# HELP {name} {_escaped(family.help)}"
        yield f"# TYPE {name} {family.kind}"
        samples = family.value if isinstance(family.value, tuple) else (({}, family.value),)
        for labels, value in samples:
            shown = ",".join(f'{key}="{_escaped(str(text))}"' for key, text in labels.items())
            yield f"{sample}{{{shown}}} {value:.12g}" if shown else f"{sample} {value:.12g}"
    if is_open:
        yield "# EOF"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
