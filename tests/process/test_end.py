"""How launches end: whose code, what is said last, and that nobody is left."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.kit import (
    PROGRAMS,
    Running,
    run_meshrun,
    start_meshrun,
    wait_for_states,
    wait_until,
)

FOUR = ("--nproc-per-node", "4")


KILLED = "killed from outside; the kernel logged no out-of-memory kill"


@pytest.mark.parametrize(
    ("how", "code", "last", "place"),
    [
        ("7", 7, "exited with code 7", ""),
        (str(2**64), 255, "exited with code 255", ""),
        ("raise", 1, "raised ValueError: the loss is nan, exit code 1", ":13 in <module>, "),
        ("chain", 1, "raised RuntimeError: no learning rate, exit code 1", ":18 in <module>, "),
        ("text", 1, "exited with code 1: the config is missing", ""),
        ("mute", 1, "exited with code 1: (no message: its __str__ raised)", ""),
        ("SIGKILL", 137, f"was killed by SIGKILL ({KILLED})", ""),
        ("SIGSEGV", 139, "was killed by SIGSEGV (a crash in native code)", ":26 in <module>, "),
        ("SIGTERM", 143, "was killed by SIGTERM (not sent by meshrun)", ""),
        ("SIGUSR1", 138, "was killed by SIGUSR1", ""),
    ],
)
def test_the_first_failure_decides_and_is_told_last(
    how: str, code: int, last: str, place: str, fake_torch: object
) -> None:
    """Exit code and last words are those of the rank that failed, and where it did."""
    ours = run_meshrun(*FOUR, PROGRAMS / "end.py", how)
    *before, cause, where = ours.stderr.splitlines()

    assert ours.returncode == code
    assert cause == f"error: rank 1 {last}"
    at = f"{PROGRAMS / 'end.py'}{place}".removeprefix(f"{os.getcwd()}/") if place else ""
    assert where.startswith(f"       {at}on {os.uname().nodename}, pid ")
    assert "meshrun: 3 ranks stopped as requested (0, 2, 3)" in before


@pytest.mark.parametrize(("how", "told"), [("raise", "ValueError"), ("chain", "KeyError: 'lr'")])
def test_the_traceback_is_pythons(how: str, told: str, fake_torch: object) -> None:
    """Once, whole, with the program's own frames and none of ours."""
    ours = run_meshrun(*FOUR, PROGRAMS / "end.py", how)

    assert ours.stderr.count("Traceback (most recent call last):") == (2 if how == "chain" else 1)
    assert told in ours.stderr
    assert f'File "{PROGRAMS / "end.py"}", line' in ours.stderr
    assert "/meshrun/worker/" not in ours.stderr


def test_ranks_that_fail_alike_are_folded(fake_torch: object) -> None:
    """An exception that all raise is told once."""
    ours = run_meshrun(*FOUR, PROGRAMS / "bad_import.py")

    assert ours.returncode == 1
    assert ours.stderr.count("No module named 'nonexistent_module_of_this_test'") == 3
    assert ours.stderr.count("Traceback") == 1


def start(tmp_path: Path, *args: str) -> "Running":
    """Start four ranks of wait.py with a short grace period."""
    return start_meshrun(  # type: ignore[return-value]
        *FOUR, "--shutdown-timeout", "1", PROGRAMS / "wait.py", *args, folder=tmp_path
    )


@pytest.mark.parametrize("extra", [[], ["deaf"], ["children"], ["deaf", "children"]])
@pytest.mark.parametrize("victim", ["launcher", "zygote", "store", "rank"])
def test_nobody_outlives_a_kill(
    victim: str, extra: list[str], fake_torch: object, tmp_path: Path
) -> None:
    """Whoever is killed, whatever the ranks started and ignore, all end."""
    with start(tmp_path, *extra) as running:
        running.wait_for("up", 4)
        below = running.below_zygote()
        pids = {
            "launcher": running.process.pid,
            "zygote": running.zygote(),
            "store": below[0],
            "rank": below[2],
        }
        os.kill(pids[victim], signal.SIGKILL)
        code = running.wait()

    assert code == {"launcher": 137, "zygote": 137, "store": 71, "rank": 137}[victim]


@pytest.mark.parametrize("method", ["fork", "exec"])
@pytest.mark.parametrize("first", ["launcher", "zygote"])
def test_nobody_outlives_launcher_and_zygote(
    first: str, method: str, fake_torch: object, tmp_path: Path
) -> None:
    """Killed at the same moment, so that neither can see to what the other leaves."""
    with start_meshrun(
        *(*FOUR, "--start-method", method, PROGRAMS / "wait.py", "deaf", "children"),
        folder=tmp_path,
    ) as running:
        running.wait_for("up", 4)
        victims = [psutil.Process(pid) for pid in (running.process.pid, running.zygote())]
        for process in victims:
            process.suspend()
        wait_for_states(victims, stopped=True)
        for process in victims if first == "launcher" else reversed(victims):
            process.kill()

        assert running.wait() == 137


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_all_and_is_passed_on_to_the_shell(
    signum: signal.Signals, fake_torch: object, tmp_path: Path
) -> None:
    """The launcher dies of the very signal, after its ranks."""
    with start(tmp_path) as running:
        running.wait_for("up", 4)
        running.signal(signum)

        assert running.wait() == 128 + signum
    assert running.stderr.splitlines()[0].startswith(f"meshrun: {signum.name}: stopping 4 ranks")


def test_deaf_ranks_are_killed_after_the_grace_period(fake_torch: object, tmp_path: Path) -> None:
    """--shutdown-timeout is the limit, for ranks that ignore the request."""
    with start(tmp_path, "deaf") as running:
        running.wait_for("up", 4)
        running.signal(signal.SIGTERM)

        assert running.wait() == 143


def test_a_third_ctrl_c_waits_for_nobody(fake_torch: object, tmp_path: Path) -> None:
    """With minutes of grace, three signals end deaf ranks at once."""
    with start_meshrun(
        *FOUR, "--shutdown-timeout", "600", PROGRAMS / "wait.py", "deaf", folder=tmp_path
    ) as running:
        running.wait_for("up", 4)
        for answer in ("SIGINT: stopping", "SIGINT again: killing"):
            running.signal(signal.SIGINT)
            wait_until(lambda answer=answer: answer in running.stderr, lambda: running.stderr)
        running.signal(signal.SIGINT)

        assert running.wait() == 130


def test_two_ctrl_c_shorten_the_grace_period(fake_torch: object, tmp_path: Path) -> None:
    """The second one leaves ranks two seconds of their ten minutes."""
    with start_meshrun(
        *FOUR, "--shutdown-timeout", "600", PROGRAMS / "wait.py", "deaf", folder=tmp_path
    ) as running:
        running.wait_for("up", 4)
        running.signal(signal.SIGINT)
        wait_until(lambda: "SIGINT: stopping" in running.stderr, lambda: running.stderr)
        running.signal(signal.SIGINT)

        assert running.wait() == 130


@pytest.mark.parametrize("pause_s", [0.001, pytest.param(0.0, marks=pytest.mark.nightly)])
def test_a_storm_of_ctrl_c_leaves_no_folder(
    pause_s: float, fake_torch: object, tmp_path: Path
) -> None:
    """However often it is pressed while the launch clears up; the fixture looks for the folder."""
    with start(tmp_path) as running:
        running.wait_for("up", 4)
        while running.process.poll() is None:
            running.signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                running.process.wait(pause_s)

        assert running.wait() == 130


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_the_decision_changes_no_code(
    signum: signal.Signals, fake_torch: object, tmp_path: Path
) -> None:
    """As from `srun --kill-on-bad-exit`, while this launcher is about to end by itself."""
    with start_meshrun(*FOUR, PROGRAMS / "end.py", "7", folder=tmp_path) as running:
        wait_until(lambda: "\nerror: " in running.stderr, lambda: running.stderr)
        running.signal(signum)

        assert running.wait() == 7


def test_nohup_is_respected(fake_torch: object, tmp_path: Path) -> None:
    """A SIGHUP that was ignored at the start stays ignored, by ranks too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with start(tmp_path) as running:
            running.wait_for("up", 4)
            running.signal(signal.SIGHUP)
            for pid in running.below_zygote():
                os.kill(pid, signal.SIGHUP)
            running.signal(signal.SIGTERM)

            assert running.wait() == 143
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_launch_ends_while_torch_is_imported(
    signum: signal.Signals, fake_torch: object, tmp_path: Path
) -> None:
    """Before there are ranks there is nothing to wait for."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with (
        start_meshrun(
            PROGRAMS / "wait.py", env={"FAKE_TORCH_WAITS": str(fifo)}, folder=tmp_path
        ) as running,
        open(fifo, "w"),
    ):  # opens once the zygote is in the middle of its import
        running.signal(signum)

        assert running.wait() == 128 + signum


@pytest.mark.nightly
def test_a_stopped_zygote_does_not_keep_the_launch(fake_torch: object, tmp_path: Path) -> None:
    """A zygote that no longer answers is ended, and its ranks with it."""
    with start(tmp_path) as running:
        running.wait_for("up", 4)
        os.kill(running.zygote(), signal.SIGSTOP)
        running.signal(signal.SIGTERM)

        assert running.wait() == 143


def test_a_stopped_zygote_wakes_when_the_launcher_is_killed(
    fake_torch: object, tmp_path: Path
) -> None:
    """Even then nobody is left."""
    with start(tmp_path, "children") as running:
        running.wait_for("up", 4)
        os.kill(running.zygote(), signal.SIGSTOP)
        running.signal(signal.SIGKILL)

        assert running.wait() == 137


def test_what_was_there_before_is_not_ours_to_end(fake_torch: object, tmp_path: Path) -> None:
    """A shell that execs meshrun may have left it children; they live on."""
    ready = tmp_path / "ready"
    result = run_in_shell(f'sleep 300 & echo $! > {ready}; exec "$@"', tmp_path)
    bystander = int(ready.read_text())

    assert result == 137
    os.kill(bystander, 0)
    os.kill(bystander, signal.SIGKILL)


def run_in_shell(script: str, tmp_path: Path) -> int:
    """Run a launch whose zygote is killed as the last act of a shell script."""
    import subprocess

    from tests.kit import command

    with open(tmp_path / "stdout", "wb") as out, open(tmp_path / "stderr", "wb") as err:
        process = subprocess.Popen(
            ["sh", "-c", script, "sh", *command(*FOUR, PROGRAMS / "wait.py")],
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    running = Running(process, tmp_path)
    running.wait_for("up", 4)
    import psutil

    zygote = next(
        child.pid
        for child in psutil.Process(process.pid).children()
        if "meshrun zygote" in " ".join(child.cmdline())
    )
    os.kill(zygote, signal.SIGKILL)
    return running.wait()


def test_what_ranks_leave_behind_is_ended_and_told(fake_torch: object, tmp_path: Path) -> None:
    """A program that goes well may still leave a process; it is ended, and one line says so."""
    program = tmp_path / "leave.py"
    program.write_text(
        "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    )
    ours = run_meshrun("--nproc-per-node", "2", program)

    assert ours.returncode == 0
    assert ours.stderr == "meshrun: killed 2 processes that the ranks left behind\n"


def test_a_message_that_is_no_text_is_told_all_the_same(fake_torch: object, tmp_path: Path) -> None:
    """A lone surrogate and control characters in a message do not hide the cause."""
    program = tmp_path / "odd.py"
    program.write_text("raise ValueError('a\\ud800b\\x1b[31m')\n")
    ours = run_meshrun("--nproc-per-node", "2", program)

    assert ours.returncode == 1
    assert "raised ValueError: a\\ud800b\\x1b[31m, exit code 1" in ours.stderr


@pytest.mark.parametrize(
    ("end", "code", "last"),
    [
        ("raise ValueError('the loss is nan')", 1, "raised ValueError: the loss is nan"),
        ("sys.exit(0)", 71, "--report: folder "),
    ],
)
def test_a_report_that_cannot_be_written_hides_no_failure(
    end: str, code: int, last: str, fake_torch: object, tmp_path: Path
) -> None:
    """The launch keeps its code and its last words, unless there was nothing else to say."""
    (folder := tmp_path / "reports").mkdir()
    (program := tmp_path / "late.py").write_text(f"import os, sys\nos.rmdir(sys.argv[1])\n{end}\n")
    ours = run_meshrun("--report", folder / "report.json", program, folder)
    told = [line for line in ours.stderr.splitlines() if line.startswith(("error:", "meshrun:"))]

    assert ours.returncode == code
    assert last in told[-1], ours.stderr
    assert any("--report: folder " in line for line in told)


def test_a_rank_that_raised_and_cannot_end_exits_with_one(
    fake_torch: object, tmp_path: Path
) -> None:
    """A thread that keeps the process alive is ended after the grace period; 1 stays 1."""
    program = tmp_path / "thread.py"
    program.write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait).start()\n"
        "raise ValueError('slow')\n"
    )
    ours = run_meshrun("--nproc-per-node", "2", "--shutdown-timeout", "0.5", program)

    assert ours.returncode == 1
    assert "raised ValueError: slow, exit code 1" in ours.stderr


@pytest.mark.parametrize(("signum", "name"), [(15, "SIGTERM"), (2, "Ctrl-C, SIGINT")])
def test_a_failure_before_a_signal_is_reported(
    signum: int, name: str, fake_torch: object, tmp_path: Path
) -> None:
    """With its traceback; the signal has the last word, as it has the exit code."""
    program = tmp_path / "fails.py"
    program.write_text(
        "import os, signal, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    open(sys.argv[1]).close()\n"
        "    raise ValueError('the loss is nan')\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "open(sys.argv[1], 'w').close()\n"
        "signal.pause()\n"
        "signal.pause()\n"
    )
    os.mkfifo(fifo := tmp_path / "fifo")  # the other rank fails once this one is ready
    words = ("--nproc-per-node", "2", "--shutdown-timeout", "600", program, fifo)
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("asked")
        running.signal(signum)
        wait_until(lambda: ": killing in" in running.stderr, lambda: running.stderr)
        running.signal(signal.SIGINT)

        assert running.wait() == 128 + signum
    said = running.stderr
    assert said.count("ValueError: the loss is nan") == 3, said  # the news, the traceback, the end
    assert 'fails.py", line 4, in <module>' in said
    assert said.endswith(f"\nmeshrun: stopped by {name}\n")


@pytest.mark.parametrize("method", ["fork", "exec"])
def test_what_was_to_run_at_exit_before_meshrun_runs_last(
    method: str, fake_torch: object, tmp_path: Path
) -> None:
    """Startup hooks register it, as that of coverage, which then writes what it measured."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os\n"
        "def tell(what):\n"
        "    if 'RANK' in os.environ: print(what)\n"
        "atexit.register(tell, 'first in, last out')\n"
        "atexit.register(tell, 'second in')\n"
    )
    program = tmp_path / "program.py"
    program.write_text("import atexit\natexit.register(print, 'of the program')\n")
    words = ("--nproc-per-node", "1", "--no-prefix", "--start-method", method)
    ours = run_meshrun(*words, program, env={"PYTHONPATH": str(tmp_path)})

    assert ours.stdout.splitlines() == ["of the program", "second in", "first in, last out"]


def test_what_collections_call_is_not_called_without_its_names(
    fake_torch: object, tmp_path: Path
) -> None:
    """JAX has such a function, whose module may be the user's own checkout."""
    program = tmp_path / "program.py"
    program.write_text(
        "import gc, os, sys\n"
        "def called(*_, of=sys.modules[__name__]): os.getpid()\n"
        "gc.callbacks.append(called)\n"
    )
    python = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    ours = run_meshrun("--nproc-per-node", "2", program)

    assert (ours.returncode, ours.stderr) == (python.returncode, python.stderr) == (0, "")
