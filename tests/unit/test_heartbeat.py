"""progress(step): what the launcher is told of it, and when."""

from __future__ import annotations

import time

import pytest

from meshrun.mesh import heartbeat as home
from meshrun.protocol import codec
from meshrun.protocol.from_zygote import RankBeat


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Give a pulse of our own, and what it sends."""
    sent: list[int | None] = []
    own = home._Heartbeat()
    own.send = sent.append
    monkeypatch.setattr(home, "pulse", own)
    return sent


def test_a_step_is_a_heartbeat_that_says_how_far(
    told: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that follow each other at once are told with the next beat, and never a lower one."""
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    home.progress(7)
    home.progress(8)
    home.progress(3)
    now_s += 10
    home.heartbeat()
    now_s += 10
    home.progress(5)

    assert told == [7, 8, 8]


def test_a_heartbeat_says_no_step(told: list[int | None]) -> None:
    """Where the program never said one."""
    home.heartbeat()

    assert told == [None]


def test_a_step_is_an_integer(told: list[int | None]) -> None:
    """A float is refused where it is said, launcher or not."""
    with pytest.raises(TypeError):
        home.progress(1.5)  # type: ignore[arg-type]
    home.progress(True)

    assert codec.decode(codec.encode(RankBeat(rank=0, at_ns=1, step=told[0]))).step == 1  # type: ignore[union-attr]


def test_nobody_needs_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun, or a plain python."""
    monkeypatch.setattr(home, "pulse", home._Heartbeat())
    home.progress(1)

    assert home.pulse.step == 1
