"""A node that cannot take part, or is told not to, before all have met: nobody waits for it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.engines.hosts import MakeHosts
from tests.engines.together import all_gone, as_shell, end_all, launch_on
from tests.kit import PROGRAMS

pytestmark = pytest.mark.torch
SAYS = PROGRAMS / "nodes.py"
AT = ("--nnodes", "3", "--rdzv-endpoint", "node0:29500", "--mesh", "dp=3,tp=2")


@pytest.mark.parametrize("host", [0, 1])
def test_a_broken_program_on_one_node_ends_all(
    make_hosts: MakeHosts, tmp_path: Path, host: int
) -> None:
    """With one code and the reason everywhere, though a third node is missing."""
    hosts = make_hosts(2)
    broken = tmp_path / "broken.py"
    broken.write_text("print(")
    launches = launch_on(hosts, each=lambda each: [*AT, broken if each == host else SAYS])

    assert end_all(launches) == [1, 1], launches[0].text + launches[1].text
    assert "SyntaxError" in launches[host].text
    told = launches[1 - host].text
    assert f"error: node{host} ended before all had joined: SyntaxError: " in told
    all_gone(hosts)


@pytest.mark.parametrize("host", [0, 1])
def test_a_program_that_is_not_there_on_one_node_ends_all(
    make_hosts: MakeHosts, tmp_path: Path, host: int
) -> None:
    """It is looked for before anything starts; the others are told all the same."""
    hosts = make_hosts(2)
    lost = tmp_path / "lost.py"
    launches = launch_on(hosts, each=lambda each: [*AT, lost if each == host else SAYS])
    codes = end_all(launches)

    assert len(set(codes)) == 1, launches[0].text + launches[1].text
    told = launches[1 - host].text
    assert f"error: node{host} ended before all had joined: " in told
    assert "lost.py" in told
    all_gone(hosts)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("host", [0, 1])
def test_a_signal_to_a_waiting_node_ends_all(
    make_hosts: MakeHosts, host: int, signum: signal.Signals
) -> None:
    """The others end with the same code, and say who was stopped by what."""
    hosts = make_hosts(2)
    launches = launch_on(hosts, *AT, SAYS)
    for launch in launches:
        launch.wait_for("2 of 3 nodes joined")
    launches[host].send(signum)

    assert [as_shell(code) for code in end_all(launches)] == [128 + signum] * 2
    reason = f"node{host} ended before all had joined: it was stopped by {signum.name}"
    assert f"error: {reason}" in launches[1 - host].text
    all_gone(hosts)
