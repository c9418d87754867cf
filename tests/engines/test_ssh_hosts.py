"""meshrun --hosts through a real sshd on each host: one command, as on a single machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.engines.over_ssh import (
    MESH,
    SAYS,
    TICKS,
    TOGETHER,
    all_gone,
    launch,
    pids_of,
    ranks_of,
    words_of,
)
from tests.engines.sshd import MakeSshd
from tests.engines.together import Launch, rank_lines
from tests.kit import (
    PROGRAMS,
    SILENT,
    command,
    is_full,
    killed_launcher,
    let_pass,
    lost_host,
    wait_for_states,
    wait_until,
)

pytestmark = pytest.mark.torch
LIMIT_S = 4.0
MOST_BYTES = 200_000_000


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_one_command_launches_on_all_hosts(make_sshd: MakeSshd, count: int) -> None:
    """One node per host, in the order of the list, and no other output."""
    sshd = make_sshd(count)
    run = launch(sshd, "--mesh", f"dp={count}", SAYS)

    assert run.end() == 0, run.text
    total = sum(range(count))
    assert rank_lines(run.text) == [
        f"rank {rank} of {count} on node{rank}: dp {rank}, sum {total}" for rank in range(count)
    ]
    assert len(run.text.splitlines()) == count, run.text
    all_gone(sshd)


@pytest.mark.nightly
def test_the_first_host_need_not_be_here(make_sshd: MakeSshd) -> None:
    """The order of the list counts; the local machine only controls the launch."""
    sshd = make_sshd(3)
    run = launch(sshd, *MESH, SAYS, hosts="node2,root@node1")

    assert run.end() == 0, run.text
    assert rank_lines(run.text)[0] == "rank 0 of 4 on node2: dp 0 tp 0, sum 6"
    assert rank_lines(run.text)[3] == "rank 3 of 4 on node1: dp 1 tp 1, sum 6"
    all_gone(sshd)


@pytest.mark.nightly
def test_one_host_elsewhere(make_sshd: MakeSshd) -> None:
    """With a single host, there is no rendezvous."""
    sshd = make_sshd(2)
    run = launch(sshd, "--mesh", "dp=2", SAYS, hosts="node1")

    assert run.end() == 0, run.text
    assert rank_lines(run.text) == [
        "rank 0 of 2 on node1: dp 0, sum 1",
        "rank 1 of 2 on node1: dp 1, sum 1",
    ]
    all_gone(sshd)


@pytest.mark.nightly
def test_a_hostfile_gives_the_workers(make_sshd: MakeSshd, tmp_path: Path) -> None:
    """With different numbers of slots, and one host excluded."""
    sshd = make_sshd(3)
    hostfile = tmp_path / "hosts"
    hostfile.write_text("node0 slots=1\nnode1 slots=2\nnode2 slots=2 # broken\n")
    words = ("--hostfile", hostfile, "--exclude", "node2", "--mesh", "dp=-1", "--device", "cpu")
    run = Launch(sshd.hosts, 0, ["--ssh", sshd.ssh, *words, SAYS])

    assert run.end() == 0, run.text
    assert rank_lines(run.text) == [
        "rank 0 of 3 on node0: dp 0, sum 3",
        "rank 1 of 3 on node1: dp 1, sum 3",
        "rank 2 of 3 on node1: dp 2, sum 3",
    ]


@pytest.mark.nightly
def test_chosen_slots_are_the_devices_that_ranks_see(make_sshd: MakeSshd, tmp_path: Path) -> None:
    """Slots 1 and 3 of a host are devices 1 and 3."""
    sshd = make_sshd(2)
    program = tmp_path / "sees.py"
    program.write_text("import os; print(os.environ.get('CUDA_VISIBLE_DEVICES', 'all'))")
    run = launch(
        sshd, "--include", "node0@node1:1,3", "--no-prefix", program, hosts="node0:1,node1:4"
    )

    assert run.end() == 0, run.text
    assert sorted(run.text.split()) == ["1,3", "1,3", "all"]


@pytest.mark.nightly
def test_the_first_failure_is_reported_once(make_sshd: MakeSshd, tmp_path: Path) -> None:
    """With the rank's exit code and traceback, and a report file on the local machine."""
    sshd = make_sshd(3)
    report = tmp_path / "report.json"
    run = launch(sshd, "--mesh", "dp=3", "--report", report, TOGETHER, "stay", "raise=2")

    assert run.end() == 1
    assert run.text.count("rank 2 [dp2] on node2 raised ValueError: the loss is nan") == 1
    assert run.text.count('raise ValueError("the loss is nan")') == 1
    assert run.text.count("error: ") == 1
    assert json.loads(report.read_text())["failures"][0]["host"] == "node2"
    all_gone(sshd)


@pytest.mark.nightly
def test_the_exit_code_is_passed_on(make_sshd: MakeSshd) -> None:
    """From a rank on another host."""
    sshd = make_sshd(2)
    run = launch(sshd, *MESH, TOGETHER, "stay", "exit=3:7")

    assert run.end() == 7
    all_gone(sshd)


@pytest.mark.nightly
def test_all_start_again_together(make_sshd: MakeSshd) -> None:
    """After a failure, which is reported once."""
    sshd = make_sshd(2)
    run = launch(sshd, "--max-restarts", "1", *MESH, TOGETHER, "stay", "once", "raise=3")

    assert run.end() == 0, run.text
    assert run.text.count("restart 1 of 1, because rank 3 [dp1 tp1] raised ValueError") == 1
    assert run.text.count("met 4") >= 5  # from the rank that raised, then from all four


@pytest.mark.nightly
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all(make_sshd: MakeSshd, signum: signal.Signals) -> None:
    """As on one node: a single Ctrl-C, and the exit code a shell expects."""
    sshd = make_sshd(3)
    run = launch(sshd, "--mesh", "dp=3", TOGETHER, "stay")
    run.wait_for("met 3", times=3)
    run.send(signum)

    assert run.end() == -signum
    assert run.text.count("meshrun: stopped by") == 1, run.text
    assert "killing in 2 s" not in run.text  # each launcher got it once
    all_gone(sshd)


@pytest.mark.nightly
@pytest.mark.parametrize("which", ["meshrun agent", "meshrun launcher --report="])
@pytest.mark.parametrize("host", [0, 1])
def test_a_signal_to_one_host_ends_all(make_sshd: MakeSshd, host: int, which: str) -> None:
    """The first host's launcher reports it, as without --hosts, and names another host."""
    sshd = make_sshd(2)
    run = launch(sshd, "--mesh", "dp=2", TOGETHER, "stay")
    run.wait_for("met 2", times=2)
    os.kill(pids_of(sshd, host, which)[0], signal.SIGTERM)

    assert run.end() == -signal.SIGTERM, run.text
    who = "node1 was " if host else ""
    assert run.text.endswith(f"\nmeshrun: {who}stopped by SIGTERM\n"), run.text
    all_gone(sshd)


@pytest.mark.nightly
def test_a_signal_to_ssh_as_well_is_a_signal(make_sshd: MakeSshd) -> None:
    """systemd signals all processes of a service; then ssh's exit does not mean a lost host."""
    sshd = make_sshd(3)
    run = launch(sshd, "--mesh", "dp=2", TOGETHER, "stay", hosts="node1,node2")
    run.wait_for("met 2", times=2)
    for pid in sshd.processes(0):
        os.kill(pid, signal.SIGTERM)

    assert run.end() == -signal.SIGTERM
    assert run.text.endswith("meshrun: stopped by SIGTERM\n"), run.text
    all_gone(sshd)


@pytest.mark.nightly
def test_a_signal_while_hosts_are_connected_is_reported(make_sshd: MakeSshd) -> None:
    """One host accepts the connection but stays silent."""
    sshd = make_sshd(2)
    sshd.servers[1].send_signal(signal.SIGSTOP)
    run = launch(sshd, "--mesh", "dp=2", TOGETHER)
    wait_until(
        lambda: bool(pids_of(sshd, 0, "-o ConnectTimeout=")) or run.process.poll() is not None,
        lambda: str(words_of(sshd, 0)),
    )
    run.send(signal.SIGINT)

    assert run.end() == -signal.SIGINT, run.text
    assert run.text.endswith("meshrun: stopped by Ctrl-C, SIGINT\n"), run.text
    sshd.servers[1].send_signal(signal.SIGCONT)
    all_gone(sshd)


@pytest.mark.nightly
def test_a_signal_before_the_nodes_have_joined(make_sshd: MakeSshd) -> None:
    """It reaches every launcher, and none waits for one that has exited."""
    sshd = make_sshd(2)
    run = launch(sshd, *MESH, SAYS, hosts="node1,node0")
    wait_until(
        lambda: bool(pids_of(sshd, 1, "meshrun launcher")) or run.process.poll() is not None,
        lambda: run.text,
    )
    run.send(signal.SIGTERM)

    assert run.end() == -signal.SIGTERM, run.text
    all_gone(sshd)


@pytest.mark.nightly
def test_a_host_that_does_not_reach_the_first_one_is_named(make_sshd: MakeSshd) -> None:
    """Both are reached from here, so only their launchers can notice it."""
    sshd = make_sshd(3)
    sshd.hosts.lose_towards(1, 2)
    timeout = ("--rdzv-conf", "join_timeout=5")
    run = launch(sshd, *timeout, *MESH, SAYS, hosts="node1,node2")

    assert run.end() == 69, run.text
    assert "error: after 5 s, 1 of 2 nodes joined; missing: node2" in run.text
    all_gone(sshd)


@pytest.mark.nightly
def test_sigquit_shows_where_every_rank_is(make_sshd: MakeSshd) -> None:
    """On all hosts, without ending the launch."""
    sshd = make_sshd(2)
    run = launch(sshd, "--mesh", "dp=2", TOGETHER, "stay")
    run.wait_for("met 2", times=2)
    run.send(signal.SIGQUIT)
    run.wait_for("together.py:", times=2)
    run.send(signal.SIGINT)

    assert run.end() == -signal.SIGINT
    all_gone(sshd)


@pytest.mark.usefixtures("fake_torch")
def test_a_killed_controller_leaves_no_process(make_sshd: MakeSshd, tmp_path: Path) -> None:
    """kill -9 of the local command ends the processes on every host, and every ssh."""
    sshd = make_sshd(3)
    (program := tmp_path / "stays.py").write_text("import time\nprint('up')\ntime.sleep(1000)\n")
    run = launch(sshd, "--export", "PYTHONPATH", "--nproc-per-node", "1", program)
    run.wait_for("up", times=3)
    run.send(signal.SIGKILL)

    run.end()
    all_gone(sshd)


@pytest.mark.nightly
def test_what_a_dead_host_leaves_is_removed_later(make_sshd: MakeSshd) -> None:
    """The next launch on that host removes its temporary folders; the fixture checks this."""
    sshd = make_sshd(2)
    run = launch(sshd, *MESH, TOGETHER, "stay")
    run.wait_for("met 4", times=4)
    sshd.hosts.kill_all(1)
    assert run.end() == 69, run.text
    left = {path.name for path in Path(tempfile.gettempdir()).glob("meshrun_*")}
    assert len(left) == 2  # the launcher's and the agent's
    elsewhere = Launch(sshd.hosts, 0, ["--mesh", "dp=1", SAYS])
    assert elsewhere.end() == 0
    assert {path.name for path in Path(tempfile.gettempdir()).glob("meshrun_*")} == left
    again = Launch(sshd.hosts, 1, ["--mesh", "dp=1", SAYS])

    assert again.end() == 0, again.text


@pytest.mark.nightly
def test_a_shared_connection_outlives_its_launch(make_sshd: MakeSshd) -> None:
    """With ControlMaster, the connection stays open, but the launch that used it ends."""
    sshd = make_sshd(2)
    sshd.write_config(f"  ControlMaster auto\n  ControlPath {sshd.folder}/c%n\n  ControlPersist 20")
    first = launch(sshd, *MESH, SAYS)
    assert first.end() == 0, first.text
    run = launch(sshd, *MESH, TOGETHER, "stay")
    run.wait_for("met 4", times=4)
    run.send(signal.SIGKILL)
    run.end()

    wait_until(
        lambda: not any(pids_of(sshd, host, "meshrun") for host in range(2)),
        lambda: str([words_of(sshd, host) for host in range(2)]),
    )


@pytest.mark.nightly
@pytest.mark.parametrize("both", [False, True])
def test_a_stopped_reader_keeps_no_host_running(make_sshd: MakeSshd, both: bool) -> None:
    """One SIGTERM is enough; buffered output is limited, and dropped output is reported."""
    sshd = make_sshd(2)
    reader, writer = os.pipe()
    words = ("--ssh", sshd.ssh, "--hosts", sshd.all, "--shutdown-timeout", "4")
    process = sshd.hosts.popen(
        0,
        command(*words, "--nproc-per-node", "1", PROGRAMS / "print_much.py", "100000000"),
        stdout=writer,
        stderr=writer if both else subprocess.PIPE,
    )
    wait_until(lambda: is_full(writer), lambda: "a full pipe")
    (controller,) = pids_of(sshd, 0, "meshrun controller")
    let_pass(LIMIT_S)
    assert psutil.Process(controller).memory_info().rss < MOST_BYTES
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    os.close(reader)
    os.close(writer)

    assert process.returncode == -signal.SIGTERM, stderr
    if not both:
        dropped = rb"\nmeshrun: dropped [0-9,]+ bytes of output"
        assert re.search(dropped, stderr), stderr
        assert b"error" not in stderr, stderr
    all_gone(sshd)


@pytest.mark.nightly
def test_a_reader_that_closes_the_pipe_ends_all(make_sshd: MakeSshd, tmp_path: Path) -> None:
    """As in `meshrun ... | head`."""
    sshd = make_sshd(2)
    program = tmp_path / "prints.py"
    program.write_text("while True: print('x' * 100)")
    line = " ".join(command("--ssh", f"'{sshd.ssh}'", "--hosts", sshd.all, program))
    run = sshd.hosts.run(0, ["bash", "-c", f"{line} | head -n 3; exit ${{PIPESTATUS[0]}}"])

    assert run.returncode == 128 + signal.SIGPIPE, run.stderr
    assert run.stdout.count("x" * 100) == 3
    all_gone(sshd)


@pytest.mark.nightly
@pytest.mark.parametrize("which", ["ssh -F", "meshrun agent", "meshrun controller"])
def test_a_killed_connection_ends_all(make_sshd: MakeSshd, which: str) -> None:
    """kill -9 of a local ssh, a remote agent or the controller; no process is left."""
    sshd = make_sshd(3)
    run = launch(sshd, "--mesh", "dp=3", TOGETHER, "stay")
    run.wait_for("met 3", times=3)
    host = 2 if which == "meshrun agent" else 0
    os.kill(pids_of(sshd, host, which)[-1], signal.SIGKILL)

    assert run.end() == (71 if which == "meshrun controller" else 69), run.text
    assert re.search(r"error: (host node\d was lost|the process that talks to)", run.text), run.text
    assert "SIGTERM" not in run.text, run.text  # no one has sent it
    all_gone(sshd)


@pytest.mark.nightly
@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_launcher_ends_all(make_sshd: MakeSshd, tmp_path: Path, node: int) -> None:
    """Its host is named, and no other launcher reports that it lost node 0."""
    sshd = make_sshd(2)
    report = tmp_path / "report.json"
    run = launch(sshd, "--mesh", "dp=2", "--report", report, TOGETHER, "stay")
    run.wait_for("met 2", times=2)
    os.kill(pids_of(sshd, node, "meshrun launcher --report=")[0], signal.SIGKILL)

    assert run.end() == 69, run.text
    error = f"{lost_host(f'node{node}')}{killed_launcher()}"
    assert run.text.rstrip().endswith(f"error: {error}"), run.text
    written = json.loads(report.read_text())
    assert (written["exit_code"], written["trouble"]["message"]) == (69, error)
    assert "error: node 0" not in run.text, run.text
    all_gone(sshd)


@pytest.mark.nightly
def test_ranks_stop_with_the_command(make_sshd: MakeSshd, tmp_path: Path) -> None:
    """By Ctrl-Z and SIGSTOP, on every host; they resume with it, and no limit counts that time."""
    sshd = make_sshd(2)
    limits = ("--hang-timeout", str(LIMIT_S), "--node-timeout", str(LIMIT_S))
    run = launch(sshd, *limits, *MESH, TICKS, tmp_path)
    run.wait_for("tick 3\n", times=4)
    ranks = ranks_of(sshd)
    assert len(ranks) == 4
    resumed = "meshrun: resumed the ranks; they were suspended with meshrun for "
    for count, signum in enumerate((signal.SIGTSTP, signal.SIGSTOP), start=1):
        run.send(signum)
        wait_for_states([psutil.Process(run.process.pid), *ranks], stopped=True)
        let_pass(1.5 * LIMIT_S)
        run.send(signal.SIGCONT)
        wait_for_states(ranks, stopped=False)
        run.wait_for(resumed, times=count)
    let_pass(LIMIT_S / 2)
    assert run.text.count("SIGTSTP: suspending the ranks until `fg` or SIGCONT") == 1, run.text
    (tmp_path / "go").touch()

    assert run.end() == 0, run.text
    assert run.text.count(resumed) == 2, run.text
    all_gone(sshd)


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["the command", "an agent", "a launcher"])
def test_no_process_is_left_of_a_suspended_launch(
    make_sshd: MakeSshd, tmp_path: Path, victim: str
) -> None:
    """kill -9 of a process that would have told the ranks to resume."""
    sshd = make_sshd(2)
    run = launch(sshd, *MESH, TICKS, tmp_path)
    run.wait_for("tick 3\n", times=4)
    ranks = ranks_of(sshd)
    run.send(signal.SIGTSTP)
    wait_for_states([psutil.Process(run.process.pid), *ranks], stopped=True)
    if victim == "the command":
        run.send(signal.SIGKILL)
    else:
        title = "meshrun agent" if victim == "an agent" else "meshrun launcher"
        os.kill(pids_of(sshd, 1, title)[0], signal.SIGKILL)
        wait_until(lambda: not any(map(psutil.pid_exists, (each.pid for each in ranks))), str)
        run.send(signal.SIGCONT)

    assert run.end() == (-signal.SIGKILL if victim == "the command" else 69), run.text
    all_gone(sshd)


@pytest.mark.nightly
@pytest.mark.parametrize("host", [0, 1])
def test_a_frozen_agent_ends_with_its_connection(make_sshd: MakeSshd, host: int) -> None:
    """Its silence counts as a loss, and it resumes once the process that started it is gone."""
    sshd = make_sshd(2)
    run = launch(sshd, "--node-timeout", "5", "--mesh", "dp=2", TOGETHER, "stay")
    run.wait_for("met 2", times=2)
    (agent,) = pids_of(sshd, host, "meshrun agent")
    os.kill(agent, signal.SIGSTOP)

    assert run.end() == 69, run.text
    assert f"error: {lost_host(f'node{host}')}{SILENT}" in run.text
    all_gone(sshd)


@pytest.mark.nightly
@pytest.mark.usefixtures("fake_torch")
@pytest.mark.parametrize("nnodes", ["2", "1:2"])
def test_ctrl_c_ends_a_launch_whose_first_host_is_frozen(
    make_sshd: MakeSshd, tmp_path: Path, nnodes: str
) -> None:
    """That host cannot pass it on to the others; the loss of it afterwards is not the cause."""
    sshd = make_sshd(2)
    limits = ("--node-timeout", "3", "--shutdown-timeout", "1", "--nnodes", nnodes)
    run = launch(sshd, *limits, "--nproc-per-node", "1", TICKS, tmp_path)
    run.wait_for("tick 3\n", times=2)
    (launcher,) = pids_of(sshd, 0, "meshrun launcher --report=")
    os.kill(launcher, signal.SIGSTOP)
    run.send(signal.SIGINT)

    assert run.end() == -signal.SIGINT, run.text
    assert run.text.endswith("meshrun: stopped by Ctrl-C, SIGINT\n"), run.text
    all_gone(sshd)


@pytest.mark.nightly
def test_a_frozen_controller_ends_all(make_sshd: MakeSshd) -> None:
    """Agents no longer hear from it; once resumed, it reports that as the cause."""
    sshd = make_sshd(2)
    run = launch(sshd, "--node-timeout", "5", "--mesh", "dp=2", TOGETHER, "stay")
    run.wait_for("met 2", times=2)
    (controller,) = pids_of(sshd, 0, "meshrun controller")
    os.kill(controller, signal.SIGSTOP)
    wait_until(
        lambda: not any(pids_of(sshd, host, "meshrun launcher") for host in range(2)),
        lambda: run.text,
    )
    os.kill(controller, signal.SIGCONT)

    assert run.end() == 69, run.text
    assert re.search(lost_host(r"node\d") + "no message from the host where", run.text)
    all_gone(sshd)


@pytest.mark.nightly
def test_a_cut_link_ends_all(make_sshd: MakeSshd) -> None:
    """Neither side hears from the other, and each exits on its own."""
    sshd = make_sshd(3)
    run = launch(sshd, "--node-timeout", "4", "--mesh", "dp=3", TOGETHER, "stay")
    run.wait_for("met 3", times=3)
    sshd.hosts.cut(1)

    assert run.end() == 69, run.text
    assert "node1" in run.text
    servers = range(len(sshd.hosts.names))
    wait_until(
        lambda: not any(pids_of(sshd, host, "meshrun") for host in servers),
        lambda: str([words_of(sshd, host) for host in servers]),
    )


@pytest.mark.nightly
def test_an_allocation_around_is_ignored(make_sshd: MakeSshd) -> None:
    """--hosts overrides a surrounding Slurm step, even a broken one; launchers do not see it."""
    sshd = make_sshd(2)
    env = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}
    run = launch(sshd, *MESH, SAYS, env=env)

    assert run.end() == 0, run.text
    assert len(rank_lines(run.text)) == len(run.text.splitlines()) == 4, run.text


@pytest.mark.usefixtures("fake_torch")
def test_nothing_secret_is_in_an_argument(make_sshd: MakeSshd, tmp_path: Path) -> None:
    """Variables and the launch's secret travel over ssh, where no other user can read them."""
    sshd = make_sshd(2)
    program = tmp_path / "tells.py"
    program.write_text(
        "import os, sys, time\n"
        "print(os.environ.get('MY_TOKEN'), os.environ.get('OTHER'), 'MESHRUN_SECRET' in os.environ)"
        "\nsys.stdout.flush(); time.sleep(1000)"
    )
    env = {"MY_TOKEN": "t0psecret", "OTHER": "stays", "MESHRUN_SECRET": "5ecret"}
    run = launch(
        sshd, "--export", "MY_*,PYTHONPATH", "--no-prefix", "--nproc-per-node", "1", program,
        hosts="node1,root@node0", env=env,
    )  # fmt: skip
    run.wait_for("t0psecret None False", times=2)
    words = [line for host in range(2) for line in words_of(sshd, host)]
    run.send(signal.SIGTERM)
    run.end()

    assert any("meshrun" in line for line in words)
    assert not [line for line in words if "t0psecret" in line or "5ecret" in line]
    all_gone(sshd)


@pytest.mark.nightly
def test_two_launches_share_the_hosts(make_sshd: MakeSshd) -> None:
    """Their ports do not collide."""
    sshd = make_sshd(2)
    first, second = (launch(sshd, *MESH, SAYS) for _ in range(2))

    assert (first.end(), second.end()) == (0, 0), first.text + second.text
    all_gone(sshd)


@pytest.mark.nightly
def test_much_output_arrives_complete(make_sshd: MakeSshd, tmp_path: Path) -> None:
    """Every line of every rank, with stdout and stderr separate."""
    sshd = make_sshd(2)
    program = tmp_path / "prints.py"
    program.write_text(
        "import os, sys\n"
        "for n in range(20000): print(os.environ['RANK'], n, 'x' * 50)\n"
        "print('done', file=sys.stderr)"
    )
    run = sshd.hosts.run(
        0, command("--ssh", sshd.ssh, "--hosts", sshd.all, "--no-prefix", "--nproc-per-node", "2",
                   program),
    )  # fmt: skip

    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 80000
    assert {line.split()[0] for line in lines} == {"0", "1", "2", "3"}
    assert {len(line.split()[2]) for line in lines} == {50}
    assert run.stderr.count("done") == 4
