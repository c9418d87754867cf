"""Signals to the launcher: --forward, and ranks that exit cleanly on SIGTERM."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from meshrun.supervisor.signals import SignalQueue
from tests.kit import (
    NONE_STARTED,
    PROGRAMS,
    ZYGOTE,
    let_pass,
    run_at_startup,
    run_meshrun,
    start_meshrun,
    wait_until,
    within,
)

USR1 = signal.SIGUSR1
FORWARDED = PROGRAMS / "forwarded.py"
PREEMPTED = PROGRAMS / "preempted.py"


def test_exit_codes_are_known_though_the_parent_ignores_sigchld(
    fake_torch: object, tmp_path: Path
) -> None:
    """Some daemons do, and a process that inherits this gets no exit codes from the kernel."""
    (program := tmp_path / "kills.py").write_text(
        "import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60)\n"
    )
    ours = run_meshrun(program, preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))

    assert ours.returncode == 137, ours.stderr
    assert f"error: {ZYGOTE} was killed by SIGKILL" in ours.stderr


@pytest.mark.usefixtures("fake_torch")
@pytest.mark.parametrize("method", ["fork", "exec"])
@pytest.mark.parametrize(
    ("words", "env", "code"),
    [
        ([], {"SLURM_JOB_ID": "7"}, 0),
        (["--forward", "QUIT"], {"SLURM_JOB_ID": "7"}, 131),
        ([], {}, 131),
    ],
    ids=["Slurm", "forwarded", "no scheduler"],
)
def test_ranks_ignore_a_sigquit_of_slurm(
    words: list[str],
    env: dict[str, str],
    code: int,
    method: str,
    tmp_path: Path,
) -> None:
    """It may send every process what only asks the launcher where the ranks are."""
    program = tmp_path / "quits.py"
    program.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGQUIT)\n")
    ours = run_meshrun("--start-method", method, *words, program, env=env)

    assert ours.returncode == code, ours.stderr


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_zygote_leaves_signals_to_the_launcher_from_its_start(
    name: str, fake_torch: object, tmp_path: Path
) -> None:
    """Schedulers signal every process of a job, and one may be starting up."""
    env = run_at_startup(
        tmp_path,
        "import os, signal, sys\n"
        f"if 'zygote' in sys.orig_argv: os.kill(os.getpid(), signal.{name})\n",
    )
    program = PROGRAMS / "echo.py"
    ours = run_meshrun(program, env=env)

    assert (ours.returncode, ours.stdout) == (0, "[rank 0] out 0\n"), ours.stderr


def test_a_signal_is_forwarded_to_ranks_that_handle_it(fake_torch: object, tmp_path: Path) -> None:
    """Not to their children, nor to a rank that it would kill; the launch continues."""
    words = ("--forward", "USR1", "--nproc-per-node", "3", FORWARDED, "0", "2")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("child up", 2)
        running.wait_for("] up ", 3)
        for times in (1, 2):
            running.signal(USR1)
            running.wait_for("child got", 2 * times)
            wait_until(
                lambda times=times: running.stderr.count("\n") >= times, lambda: running.stderr
            )
        stderr = running.stderr
        running.signal(signal.SIGTERM)
        assert running.wait() == 143
    lines = running.stdout.splitlines()
    for rank in (0, 2):
        assert lines.count(f"[rank {rank}] got SIGUSR1") == 2
        assert lines.count(f"[rank {rank}] child got []") == 2
    why = "it has no handler and would be killed"
    assert stderr == f"meshrun: SIGUSR1 was not forwarded to rank 1: {why}\n" * 2


def test_a_signal_to_the_whole_job_is_forwarded_once(fake_torch: object, tmp_path: Path) -> None:
    """A shell's `kill %1` and some schedulers send it so; meshrun's other processes survive it."""
    words = ("--forward", "USR1", "--nproc-per-node", "2", FORWARDED, "0", "1")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("child up", 2)
        running.wait_for("] up ", 2)
        store, *_ = running.below_zygote()
        os.kill(store, USR1)
        os.killpg(running.process.pid, USR1)
        running.wait_for("child got", 2)
        running.signal(signal.SIGTERM)
        assert running.wait() == 143
    assert running.stdout.count("got SIGUSR1") == 2
    assert "was killed by" not in running.stderr


def test_without_forward_a_signal_has_its_default_action(
    fake_torch: object, tmp_path: Path
) -> None:
    """SIGUSR1 kills the launcher, like any process that does not handle it."""
    with start_meshrun("--nproc-per-node", "2", FORWARDED, folder=tmp_path) as running:
        running.wait_for("] up ", 2)
        running.signal(USR1)
        assert running.wait() == 128 + USR1


def test_a_signal_that_ends_the_launch_cannot_be_forwarded() -> None:
    """The error names the signal."""
    ours = run_meshrun("--forward", "USR1,TERM", FORWARDED)

    assert ours.returncode == 2
    assert "--forward SIGTERM: this signal ends the launch" in ours.stderr


def test_a_stop_signal_that_is_not_handled_can_be_forwarded(
    fake_torch: object, tmp_path: Path
) -> None:
    """SIGHUP, if --signals-to-handle leaves it out."""
    words = ("--signals-to-handle", "TERM", "--forward", "HUP", "--nproc-per-node", "2")
    with start_meshrun(*words, FORWARDED, folder=tmp_path) as running:
        running.wait_for("] up ", 2)
        running.signal(signal.SIGHUP)
        wait_until(lambda: "was not forwarded" in running.stderr, lambda: running.stderr)
        running.signal(signal.SIGTERM)
        assert running.wait() == 143
    assert (
        "meshrun: SIGHUP was not forwarded to all x2: it has no handler and would be killed"
        in running.stderr
    )


@pytest.mark.parametrize(
    ("ways", "code", "last"),
    [
        (("well", "well"), 75, "stopped by SIGTERM; every rank exited on its own with exit code 0"),
        (("well", "done"), 75, "stopped by SIGTERM; every rank exited on its own with exit code 0"),
        (("well", "badly"), 143, "stopped by SIGTERM"),
        (("well", "at all"), 143, "stopped by SIGTERM"),
    ],
)
def test_a_launch_that_was_preempted_says_so(
    ways: tuple[str, str], code: int, last: str, fake_torch: object, tmp_path: Path
) -> None:
    """Exit code 75 if every rank exits with 0 on SIGTERM, so that a scheduler requeues the job."""
    report = tmp_path / "report.json"
    words = ("--nproc-per-node", "2", "--report", report, PREEMPTED, *ways)
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("up", 2)
        pids = dict(re.findall(r"rank (\d)\] up (\d+)", running.stdout))
        done = [Path("/proc", pids[str(rank)]) for rank, way in enumerate(ways) if way == "done"]
        wait_until(lambda: not any(path.exists() for path in done), lambda: str(done))
        running.signal(signal.SIGTERM)
        assert running.wait() == code
    assert running.stderr.splitlines()[-1] == f"meshrun: {last}"
    result = json.loads(report.read_text())
    assert (result["preempted"], result["exit_code"]) == (code == 75, code)


def test_preempted_is_a_failure_for_torchruns_exit_codes(
    fake_torch: object, tmp_path: Path
) -> None:
    """The exit code is 1, as for any signal."""
    words = ("--exit-code", "torchrun", PREEMPTED, "well")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("up")
        running.signal(signal.SIGTERM)
        assert running.wait() == 1


def test_ranks_that_do_not_exit_in_time_are_named(fake_torch: object, tmp_path: Path) -> None:
    """With how many have exited, before SIGKILL."""
    words = ("--nproc-per-node", "3", "--shutdown-timeout", "2")
    with start_meshrun(*words, PREEMPTED, "well", "never", "well", folder=tmp_path) as running:
        running.wait_for("up", 3)
        running.signal(signal.SIGTERM)
        assert running.wait() == 143
    assert running.stderr.splitlines() == [
        "meshrun: SIGTERM: stopping 3 ranks, up to 2 s",
        "meshrun: timed out after 2 s: 2 of 3 ranks exited; killing rank 1",
        "meshrun: stopped by SIGTERM",
    ]


@pytest.mark.parametrize(
    ("signum", "first", "again"),
    [
        (signal.SIGTERM, "", "send it"),
        (signal.SIGINT, "; press Ctrl-C again to kill them after 2 s", "press Ctrl-C"),
    ],
    ids=["SIGTERM", "SIGINT"],
)
@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.usefixtures("fake_torch")
def test_each_further_signal_leaves_less_time_and_says_so(
    times: int, signum: signal.Signals, first: str, again: str, tmp_path: Path
) -> None:
    """The second leaves deaf ranks two seconds of their ten minutes, the third nothing."""
    words = ("--nproc-per-node", "2", "--shutdown-timeout", "600", PROGRAMS / "wait.py", "deaf")
    name = signum.name
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("up", 2)
        for text in (f"{name}: stopping", "killing in 2 s;", "killing both now")[:times]:
            running.signal(signum)
            wait_until(lambda text=text: text in running.stderr, lambda: running.stderr)
            let_pass(0.05)  # a SIGTERM that comes sooner is counted as the same
        assert running.wait() == 128 + signum
    assert running.stderr.splitlines() == [
        f"meshrun: {name}: stopping 2 ranks, up to 600 s{first}",
        f"meshrun: {name} again: killing in 2 s; {again} again to kill now",
        "meshrun: timed out: 0 of 2 ranks exited; killing both"
        if times == 2
        else f"meshrun: {name} again: killing both now",
        f"meshrun: stopped by {'Ctrl-C, ' * (signum == signal.SIGINT)}{name}",
    ]


def test_the_end_of_the_zygote_ends_no_lookup_of_the_launcher(
    fake_torch: object, tmp_path: Path
) -> None:
    """A lookup that was ended counted as an address of another machine, and others were opened."""
    env = run_at_startup(
        tmp_path,
        "import socket, time\n"
        "def getaddrinfo(host, *args, known=socket.getaddrinfo, **kwargs):\n"
        "    time.sleep(600 if host == 'slow.example' else 0)\n"
        "    return known(host, *args, **kwargs)\n"
        "socket.getaddrinfo = getaddrinfo\n",
    )
    words = ("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "slow.example:29500")
    with start_meshrun(*words, PREEMPTED, env=env, folder=tmp_path) as running:
        wait_until(lambda: "has not answered yet" in running.stderr, lambda: running.stderr)
        running.signal(signal.SIGTERM)
        assert running.wait() == 143
    assert running.stderr.splitlines()[-2:] == [
        f"meshrun: SIGTERM: {NONE_STARTED}",
        "meshrun: stopped by SIGTERM",
    ]


def test_an_interrupt_of_a_launcher_that_starts_prints_no_traceback(
    fake_torch: object, tmp_path: Path
) -> None:
    """Python prints one while it starts; launch() and --watch pass Ctrl-C on at any time."""
    env = run_at_startup(
        tmp_path,
        "import os, signal, sys\n"
        "if 'launcher' in sys.orig_argv: os.kill(os.getpid(), signal.SIGINT)\n",
    )
    (caller := tmp_path / "calls.py").write_text(
        "import sys, meshrun\n"
        "try: print(meshrun.launch(sys.argv[1]).trouble)\n"
        "except meshrun.MeshrunError as error: print(error)\n"
    )
    with start_meshrun(PROGRAMS / "echo.py", env=env, folder=tmp_path, caller=caller) as running:
        running.wait()

    assert "Traceback" not in running.stderr
    assert "the launcher was killed by SIGINT before" in running.stdout


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
@pytest.mark.parametrize("is_first", [False, True], ids=["", "PID 1"])
def test_a_signal_while_meshrun_is_imported(*, name: str, is_first: bool, tmp_path: Path) -> None:
    """The kernel drops a signal to PID 1 of a container that has no handler for it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Signals:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == 'meshrun.cli.options': os.kill(os.getpid(), signal.{name})\n"
        "sys.meta_path.insert(0, Signals())\n"
    )
    around = within("--user", "--map-root-user", "--pid", "--fork", prepare=":") if is_first else ()
    ours = run_meshrun(PROGRAMS / "echo.py", env={"PYTHONPATH": str(tmp_path)}, around=around)

    signum = signal.Signals[name]
    assert ours.returncode == (128 + signum if is_first else -signum)
    assert (ours.stdout, ours.stderr) == ("", f"meshrun: stopped by {name}\n")


def test_a_signal_that_is_sent_twice_at_once_counts_as_one() -> None:
    """timeout(1) sends it to meshrun, then to its process group; others may mean each one."""
    once, each = signal.SIGUSR1, (signal.SIGUSR2, signal.SIGINT)
    queue = SignalQueue([once, signal.SIGINT], always=[signal.SIGUSR2])
    try:
        for signum in 2 * (once, *each):
            signal.raise_signal(signum)
        assert queue.take() == [once, *each, *each]
        let_pass(0.05)
        signal.raise_signal(once)
        assert queue.take() == [once]
    finally:
        queue.restore()


def test_a_blocked_signal_is_caught() -> None:
    """SIGINT is blocked in every process that a Ray worker starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    queue = SignalQueue([signal.SIGUSR1])
    try:
        signal.raise_signal(signal.SIGUSR1)
        assert queue.wait() == [signal.SIGUSR1]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        queue.restore()
