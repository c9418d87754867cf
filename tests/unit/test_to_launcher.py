"""What heartbeat() and progress(step) send to the launcher, and when."""

from __future__ import annotations

import socket
import time

import pytest

from meshrun.mesh import to_launcher as module
from meshrun.protocol import codec
from meshrun.protocol.zygote_messages import RankBeat, RankReady
from meshrun.worker.reporter import Reporter


@pytest.fixture
def sent_steps(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Return the steps that are sent to a stand-in for the launcher."""
    sent: list[int | None] = []
    own = module._ToLauncher()
    own.send_beat = sent.append
    monkeypatch.setattr(module, "to_launcher", own)
    return sent


def test_a_step_is_a_heartbeat(
    sent_steps: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps reported in quick succession go with the next heartbeat; a lower step is never sent."""
    now_s = time.monotonic()
    monkeypatch.setattr(time, "clock_gettime", lambda _: now_s)
    module.progress(7)
    module.progress(8)
    module.progress(3)
    now_s += 10
    module.heartbeat()
    now_s += 10
    module.progress(5)

    assert sent_steps == [7, 8, 8]


def test_a_heartbeat_without_a_step(sent_steps: list[int | None]) -> None:
    """The program never reported one."""
    module.heartbeat()

    assert sent_steps == [None]


def test_a_step_is_an_integer(sent_steps: list[int | None]) -> None:
    """A float is rejected at once, with or without a launcher."""
    with pytest.raises(TypeError):
        module.progress(1.5)  # type: ignore[arg-type]
    module.progress(True)

    assert codec.decode(codec.encode(RankBeat(rank=0, at_ns=1, step=sent_steps[0]))).step == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("step", [10**400, -(10**5000)], ids=["large", "negative"])
def test_a_step_that_fits_nowhere_is_cut(step: int, sent_steps: list[int | None]) -> None:
    """Metrics are floats, and Python writes no number of more than 4300 digits."""
    module.progress(step)
    text = codec.encode(RankBeat(rank=0, at_ns=1, step=sent_steps[0]))

    assert f"{codec.decode(text).step:.0f}" in (f"{2**63:.0f}", f"-{2**63:.0f}")  # type: ignore[union-attr]


def test_no_launcher_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun or plain Python."""
    monkeypatch.setattr(module, "to_launcher", module._ToLauncher())
    module.progress(1)

    assert module.to_launcher.step == 1


def test_time_is_true_where_a_program_freezes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that failed first would otherwise be the last one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, monkeypatch.context() as frozen:
        frozen.setattr(time, "monotonic_ns", lambda: 2**60)
        Reporter(ours, 0).report(RankReady)
        reported = codec.decode(theirs.recv(4096))

    assert 0 < reported.at_ns <= time.monotonic_ns()  # type: ignore[union-attr]
