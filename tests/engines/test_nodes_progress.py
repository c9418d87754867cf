"""Several hosts: the progress that one node's ranks report decides for all."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.engines.hosts import MakeHosts
from tests.engines.together import Launch, all_gone, as_shell, end_all, launch_on, wait_for_all
from tests.kit import PROGRAMS, ROOT, let_pass, ranks_below, wait_for_states

pytestmark = pytest.mark.torch
STEPS = PROGRAMS / "steps.py"
LIMIT_S = 6.0
REPEATS = int(os.environ.get("MESHRUN_REPEATS", "1"))
AT = ("--nnodes", "2", "--rdzv-endpoint", "node0:29500", "--nproc-per-node", "1")


def test_the_first_node_knows_the_progress_of_the_others(
    make_hosts: MakeHosts, fake_torch: Path, tmp_path: Path
) -> None:
    """It gives up for all nodes when another node makes no progress."""
    report = tmp_path / "report.json"
    words = (*AT, "--max-restarts", "9", "--report", str(report), STEPS)
    launches = launch_on(make_hosts(2), *words, "1-10:nan", "5-20:nan", "15-20:nan")

    assert end_all(launches) == [1, 1], launches[0].text + launches[1].text
    result = json.loads(report.read_text())
    assert "not restarted: 3 failures in a row at step 20: ValueError (" in launches[0].text
    assert result["best_steps"] == [10, 20, 20, 20]
    assert [launch.text.count("meshrun: restart ") for launch in launches] == [3, 3]


@pytest.mark.nightly
@pytest.mark.parametrize("host", [0, 1])
def test_a_signal_to_one_node_ends_the_wait_of_all(make_hosts: MakeHosts, host: int) -> None:
    """Each launcher delays its restart on its own, and all are told to stop."""
    hosts = make_hosts(2)
    launches = launch_on(hosts, *AT, "--max-restarts", "9", STEPS, ":3")
    wait_for_all(launches, "restart 4 of 9 in 4 s, because rank 1 exited with code 3")
    launches[host].send(signal.SIGTERM)

    codes = [as_shell(code) for code in end_all(launches)]

    assert codes == [143, 143], launches[0].text + launches[1].text
    assert not any("restart 5" in launch.text for launch in launches)
    all_gone(hosts)


@pytest.mark.nightly
@pytest.mark.parametrize("host", [1, 0])
def test_a_stopped_node_is_no_hang(make_hosts: MakeHosts, tmp_path: Path, host: int) -> None:
    """The other node's ranks wait longer than --hang-timeout; only --node-timeout applies."""
    hosts = make_hosts(2)
    words = (*AT, "--hang-timeout", str(LIMIT_S), "--node-timeout", "300")
    launches = launch_on(hosts, *words, PROGRAMS / "in_step.py", tmp_path)
    wait_for_all(launches, "step 3\n")
    ranks = [each for each in ranks_below(launches[host].process.pid) if each.is_running()]
    launches[host].send(signal.SIGSTOP)
    wait_for_states(ranks, stopped=True)
    let_pass(1.5 * LIMIT_S)
    launches[host].send(signal.SIGCONT)
    wait_for_states(ranks, stopped=False)
    let_pass(LIMIT_S / 2)
    (tmp_path / "go").touch()

    assert end_all(launches) == [0, 0], launches[0].text + launches[1].text
    all_gone(hosts)


@pytest.mark.nightly
def test_a_training_goes_on_on_fewer_nodes(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """One launcher is killed; the other node continues alone from their last checkpoint."""
    hosts, checkpoints = make_hosts(2), tmp_path / "checkpoints"
    words = ("--device", "cpu", "--no-prefix", ROOT / "examples" / "resume.py", checkpoints)
    both = launch_on(hosts, *AT, "--mesh", "dp=2", *words, str(10**9))
    both[0].wait_for("step 12: ")
    both[1].send(signal.SIGKILL)
    end_all(both)
    all_gone(hosts)
    saved = max(int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal())
    alone = Launch(hosts, 0, ["--mesh", "dp=1", *words, str(saved + 15)])

    assert alone.end() == 0, alone.text
    assert f"from step {saved} on, with {{'dp': 1}}" in alone.text
    steps = [int(number) for number in re.findall(r"step (\d+): ", alone.text)]
    assert steps == list(range(saved + 1, saved + 16))


@pytest.mark.nightly
@pytest.mark.parametrize(("slow", "how"), [(0, "sleeps"), (1, "works"), (-1, "sleeps")])
def test_a_slow_rank_is_named_among_those_of_other_nodes(
    make_hosts: MakeHosts, tmp_path: Path, slow: int, how: str
) -> None:
    """Each node has one rank and cannot compare it with others, so node 0 names it.

    It also gives the reason, as seen on the rank's own node. If none is slow, none is named: other
    programs may slow down one by chance, but not the same one each time.
    """
    by_chance = {"0", "1"}
    for _ in range(3 if slow < 0 else REPEATS):
        hosts, go = make_hosts(2), tmp_path / "go"
        go.unlink(missing_ok=True)
        words = (*AT, "--mesh", "dp=2,tp=1", "--stragglers", "--straggler-time", "1")
        args = (str(slow), "20" if slow < 0 else "60", go, how)
        launches = launch_on(hosts, *words, PROGRAMS / "straggling.py", *args)
        if slow >= 0:
            where = " on node 1" if slow else ""
            launches[0].wait_for(f"rank {slow} [dp{slow} tp0]{where} reaches collectives of ")
            if how == "works":
                launches[0].wait_for(" ms each time (it used a core ")
            go.touch()

        assert end_all(launches) == [0, 0], launches[0].text + launches[1].text
        late = re.findall(r"rank (\d) \[.*?\].* reaches ", launches[0].text + launches[1].text)
        if slow >= 0:
            assert late == [str(slow)]
        elif not (by_chance := by_chance & {*late}):
            return
    assert slow >= 0, by_chance
