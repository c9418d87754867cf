"""Several hosts: what one node's ranks say of their progress decides for all."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.engines.hosts import MakeHosts
from tests.engines.together import all_gone, as_shell, end_all, launch_on
from tests.kit import PROGRAMS

pytestmark = pytest.mark.torch
STEPS = PROGRAMS / "steps.py"
AT = ("--nnodes", "2", "--rdzv-endpoint", "node0:29500", "--nproc-per-node", "1")


def test_the_first_node_knows_how_far_the_others_came(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    """It gives up, for all nodes, what comes no further on another one."""
    report = tmp_path / "report.json"
    words = (*AT, "--max-restarts", "9", "--report", str(report), STEPS)
    launches = launch_on(make_hosts(2), *words, "1-10:nan", "5-20:nan", "15-20:nan")

    assert end_all(launches) == [1, 1], launches[0].text + launches[1].text
    result = json.loads(report.read_text())
    assert "not started again: 3 failures in a row at step 20: ValueError (" in launches[0].text
    assert result["best_steps"] == [10, 20, 20, 20]
    assert [launch.text.count("meshrun: restart ") for launch in launches] == [3, 3]


@pytest.mark.parametrize("host", [0, 1])
def test_a_signal_to_one_node_ends_the_wait_of_all(make_hosts: MakeHosts, host: int) -> None:
    """Every launcher waits by itself, and hears of the end."""
    hosts = make_hosts(2)
    launches = launch_on(hosts, *AT, "--max-restarts", "9", STEPS, ":3")
    for launch in launches:
        launch.wait_for("restart 4 of 9 in 4 s, because rank 1 exited with code 3")
    launches[host].send(signal.SIGTERM)

    codes = [as_shell(code) for code in end_all(launches)]

    assert codes == [143, 143], launches[0].text + launches[1].text
    assert not any("restart 5" in launch.text for launch in launches)
    all_gone(hosts)
