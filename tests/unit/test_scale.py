"""Thousands of simulated nodes; the figures are in docs/performance.md."""

from __future__ import annotations

import pytest

from tests.benchmarks.scale import measure


@pytest.mark.nightly
@pytest.mark.slow
def test_a_thousand_nodes_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """All join, learn of a failure, and reconnect after a cut, in little memory."""
    monkeypatch.setattr("tests.benchmarks.scale._STEADY_S", 1.0)
    found = measure(1000)

    assert found["peak_after_storm_MB"] < found["base_MB"] + 100
    assert found["reconnects"] == 0
