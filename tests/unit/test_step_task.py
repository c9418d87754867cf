"""What the launchers of a Slurm step report to the meshrun that waits for srun, and get from it."""

from __future__ import annotations

import os
import signal

import pytest

from meshrun.host.reactor import Reactor
from meshrun.protocol.caller import StepReports, StepTask

STEP = "meshrun-1f"


def reported(capfd: pytest.CaptureFixture[str], *ends: tuple[int, bool, bool]) -> bytes:
    """Return what launchers print that end with a code, the first or not, all over or not."""
    for code, is_first, is_over in ends:
        StepTask(STEP, is_first, 0).report_end(code, is_over=is_over)
    return capfd.readouterr().err.encode()


def test_reports_of_a_step_are_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    """However the output is split; text that only begins like a report is shown."""
    lines = reported(capfd, (7, True, True), (0, False, False))
    other = b"\x1emeshrun-2 11 9\x1e\n"
    shown = [b"a\n", b"b \x1e c\n", other, b"end \x1e"]
    text = lines.join(shown)
    for size in (1, 2, 5, len(text)):
        ends = StepReports(STEP)
        parts = [ends.feed(text[at : at + size]) for at in range(0, len(text), size)]

        assert b"".join([*parts, ends.feed(b"")]) == b"".join(shown)
        assert ends.code(137) == 7
    labeled = b"".join(b" 1: " + line for line in lines.splitlines(keepends=True))
    assert StepReports(STEP).feed(labeled.replace(b"\n", b"\r\n")) == b""


@pytest.mark.parametrize(
    ("ends", "of_srun", "code"),
    [
        ([(0, True, True)], 137, 0),
        ([(69, True, True), (0, False, False)], 137, 69),
        ([(69, False, False)], 0, 69),
        ([(0, False, True)], 0, 0),
        ([(0, False, True)], 137, 137),
        ([], 2, 2),
        ([], 0, None),
    ],
    ids=["a lost node", "it failed", "no first node", "success", "killed", "no report", "all lost"],
)
def test_the_first_node_decides(
    capfd: pytest.CaptureFixture[str],
    ends: list[tuple[int, bool, bool]],
    of_srun: int,
    code: int | None,
) -> None:
    """Without its report, the others and srun decide; srun's 0 alone means nothing."""
    seen = StepReports(STEP)
    assert seen.feed(reported(capfd, *ends)) == b""

    assert seen.code(of_srun) == code
    assert seen.is_over == any(is_over for _, _, is_over in ends)


def test_signals_arrive_through_a_pipe() -> None:
    """Those from before, and later ones; its end is no signal."""
    orders, to_launcher = os.pipe()
    raised: list[int] = []
    before = [signal.signal(each, lambda *got: raised.append(got[0])) for each in (10, 15)]
    os.write(to_launcher, bytes([15, 10]))
    with Reactor() as reactor:
        StepTask(STEP, True, orders).raise_signals(reactor)
        reactor.run_until(lambda: len(raised) == 2)
        os.write(to_launcher, bytes([15]))
        os.close(to_launcher)
        reactor.run_until(lambda: len(raised) == 3)
        reactor.turn()
    for signum, handler in zip((10, 15), before, strict=True):
        signal.signal(signum, handler)

    assert sorted(raised[:2]) == [10, 15]
    assert raised[2:] == [15]
