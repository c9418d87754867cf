"""Ctrl-Z and SIGSTOP: the ranks stop with the launcher, and time limits do not count that time."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.kit import (
    PROGRAMS,
    command,
    let_pass,
    ranks_below,
    run_meshrun,
    start_meshrun,
    wait_for_states,
    wait_until,
)
from tests.terminal import Terminal

LIMIT_S = 2.0
TICKS = PROGRAMS / "ticks.py"
HELD = """\
import os, sys
into = (os.POSIX_SPAWN_OPEN, 0, sys.argv[-1], os.O_RDONLY, 0)
os.posix_spawn("/bin/true", ["true"], {}, file_actions=[into])  # waits as the child does: vfork(2)
"""
OPENS = "import sys\nopen(sys.argv[-1]).close()  # waits until it is open for writing\n"
WORDS = ("--nproc-per-node", "2", "--hang-timeout", str(LIMIT_S))


def test_ctrl_z_stops_the_ranks_and_fg_continues_them(fake_torch: object, tmp_path: Path) -> None:
    """In a shell with job control, even if the launch is stopped for longer than --hang-timeout."""
    line = " ".join(command(*WORDS, TICKS, tmp_path))
    terminal = Terminal(["bash", "--norc", "--noprofile", "-i"], {"PS1": "$ "}, 200, 40)
    try:
        terminal.type(f"{line}\n")
        terminal.wait_for("[rank 0] tick 3")
        terminal.wait_for("[rank 1] tick 3")
        (launcher,) = psutil.Process(terminal.process.pid).children()
        ranks = ranks_below(launcher.pid)
        assert len(ranks) == 2
        terminal.type("\x1a")
        terminal.wait_for("meshrun: SIGTSTP: suspending the ranks until `fg` or SIGCONT")
        terminal.wait_for("Stopped")
        wait_for_states([launcher, *ranks], stopped=True)
        let_pass(2 * LIMIT_S)
        wait_for_states(ranks, stopped=True)
        terminal.type("fg; echo ended with $?\n")
        wait_for_states([launcher, *ranks], stopped=False)
        terminal.wait_for("resumed the ranks; they were suspended with meshrun for")
        let_pass(LIMIT_S / 2)
        (tmp_path / "go").touch()
        terminal.wait_for("ended with 0")
        terminal.type("exit\n")
        terminal.wait()
    finally:
        terminal.end()


@pytest.mark.skipif(not Path("/proc/self/syscall").exists(), reason="no CONFIG_HAVE_ARCH_TRACEHOOK")
def test_a_rank_that_reads_the_terminal_is_stopped_in_the_background(
    fake_torch: object, tmp_path: Path
) -> None:
    """Like any job: after ``bg`` the keys go to the shell, after ``fg`` to the rank."""
    program = tmp_path / "read.py"
    program.write_text("import sys\nfor line in sys.stdin: print('read', line, flush=True)\n")
    line = " ".join(command("--nproc-per-node", "2", program))
    terminal = Terminal(["bash", "--norc", "--noprofile", "-i"], {"PS1": "now:"}, 200, 40)
    try:
        terminal.type(f"{line}\n")
        terminal.type("one\n")
        terminal.wait_for("[rank 0] read one")
        terminal.type("\x1a")
        terminal.wait_for("Stopped")
        terminal.type("bg\n")
        terminal.wait_for(
            "a rank tried to read the terminal from the background: suspending the ranks"
        )
        terminal.wait_for("now:", 3)
        terminal.type("echo 6 $((6 * 7))\n")
        terminal.wait_for("6 42")
        terminal.type("fg\n")
        terminal.wait_for("resumed the ranks", 2)
        terminal.type("two\n")
        terminal.wait_for("[rank 0] read two")
        terminal.type("\x04")
        terminal.wait_for("now:", 5)
        terminal.type("exit\n")
        terminal.wait()
    finally:
        terminal.end()


CALLER = """import sys, meshrun
*options, program, folder = sys.argv[1:]
meshrun.launch(program, args=[folder], options=options)
"""


@pytest.mark.parametrize("way", ["fork", pytest.param("exec", marks=pytest.mark.nightly), "launch"])
def test_a_launcher_stopped_by_sigstop_has_its_ranks_stopped(
    way: str, fake_torch: object, tmp_path: Path
) -> None:
    """SIGSTOP cannot be caught, also not by a caller of launch(); a kill leaves no rank behind."""
    words, caller = (*WORDS, "--start-method", way), None
    if way == "launch":
        words, caller = WORDS, tmp_path / "caller.py"
        caller.write_text(CALLER)
    with start_meshrun(*words, TICKS, tmp_path, folder=tmp_path, caller=caller) as run:
        for rank in (0, 1):
            run.wait_for(f"[rank {rank}] tick 3")
        ranks = ranks_below(run.process.pid)
        run.signal(signal.SIGSTOP)
        wait_for_states(ranks, stopped=True)
        let_pass(2 * LIMIT_S)
        run.signal(signal.SIGCONT)
        wait_for_states(ranks, stopped=False)
        resumed = "meshrun: resumed the ranks; they were suspended with meshrun for "
        wait_until(lambda: resumed in run.stderr, lambda: run.stderr)
        assert "no rank has made progress" not in run.stderr
        run.signal(signal.SIGSTOP)
        wait_for_states(ranks, stopped=True)
        run.signal(signal.SIGKILL)

        assert run.wait() == 137
        wait_until(lambda: not any(each.is_running() for each in ranks), lambda: str(ranks))


def test_quiet_ranks_stop_with_the_program_that_launched_them(
    fake_torch: object, tmp_path: Path
) -> None:
    """No output of theirs wakes the launcher, so it has to check its caller's state by itself.

    They also end with it, even if the launcher is stopped then.
    """
    caller = tmp_path / "caller.py"
    caller.write_text(CALLER)
    program = PROGRAMS / "wait.py"
    with start_meshrun(*WORDS[:2], program, tmp_path, folder=tmp_path, caller=caller) as run:
        run.wait_for("up", 2)
        ranks = ranks_below(run.process.pid)
        run.signal(signal.SIGSTOP)
        wait_for_states(ranks, stopped=True)
        run.signal(signal.SIGCONT)
        wait_for_states(ranks, stopped=False)
        [launcher] = psutil.Process(run.process.pid).children()
        launcher.suspend()
        run.signal(signal.SIGKILL)

        assert run.wait() == 137
        wait_until(lambda: not any(each.is_running() for each in ranks), lambda: str(ranks))


@pytest.mark.skipif(sys.platform != "linux", reason="ptrace differs between systems")
@pytest.mark.parametrize("leaves", [False, True])
def test_a_process_that_asks_to_be_traced_runs_on(
    leaves: bool, fake_torch: object, tmp_path: Path
) -> None:
    """The kernel stops it at each signal, which to its parent looks like its end."""
    (program := tmp_path / "traced.py").write_text(
        "import ctypes, os, signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('got it', flush=True))\n"
        "if len(sys.argv) > 1:\n"
        "    ready, done = os.pipe()\n"
        "    if os.fork() > 0:\n"
        "        os.read(ready, 1)\n"
        "        sys.exit()\n"
        "    while os.getppid() == int(os.environ['MESHRUN_WORKER_PID']):\n"
        "        os.write(done, b'.')\n"
        "        time.sleep(0.01)\n"
        "ctypes.CDLL(None).ptrace(0, 0, 0, 0)\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "if len(sys.argv) > 1:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    time.sleep(60)\n"
    )
    ours = run_meshrun("--shutdown-timeout", "1", program, *["leaves"] * leaves)

    assert ours.returncode == 0, ours.stderr
    assert ours.stdout == "[rank 0] got it\n" or leaves
    assert "killed 1 process" in ours.stderr or not leaves


@pytest.mark.nightly
@pytest.mark.parametrize("state", ["T", "D"])
def test_a_zygote_that_cannot_run_is_noted(state: str, fake_torch: object, tmp_path: Path) -> None:
    """Nothing else says what the launch waits for."""
    os.mkfifo(pipe := tmp_path / "pipe")
    (tmp_path / "held.py").write_text(HELD if state == "D" else OPENS)
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"}
    (program := tmp_path / "runs.py").write_text("print('up')\n")
    with start_meshrun("--preload", "held", program, pipe, env=env, folder=tmp_path) as running:
        zygote = running.zygote()
        if state == "T":
            cmdline = psutil.Process(zygote).cmdline
            wait_until(lambda: "zygote" in cmdline(), lambda: "no zygote")  # after execve
            os.kill(zygote, signal.SIGSTOP)
        wait_until(lambda: f"(process {zygote})" in running.stderr, lambda: running.stderr)
        if state == "T":
            os.kill(zygote, signal.SIGCONT)
        os.close(os.open(pipe, os.O_WRONLY))
        assert running.wait() == 0

    what = {"T": f"is stopped; the launch waits for it until `kill -CONT {zygote}`"}.get(
        state, "which is waiting for a disk, a driver or a network file system (state D in `ps`)"
    )
    assert what in running.stderr
