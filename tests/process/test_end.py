"""How launches end: exit code, last lines, and no process left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from meshrun.start import own_command
from tests.kit import (
    FAKES,
    LEFT_BEHIND,
    PROGRAMS,
    ROOT,
    Running,
    command,
    run_at_startup,
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
        ("odd", 1, r"raised ValueError: a\ud800b\x1b[31m, exit code 1", ":33 in <module>, "),
        ("text", 1, "exited with code 1: the config is missing", ""),
        ("mute", 1, "exited with code 1: (no message: its __str__ raised)", ""),
        ("SIGKILL", 137, f"was killed by SIGKILL ({KILLED})", ""),
        ("SIGSEGV", 139, "was killed by SIGSEGV (a crash in native code)", ":30 in <module>, "),
        ("SIGTERM", 143, "was killed by SIGTERM (not sent by meshrun)", ""),
        ("SIGUSR1", 138, "was killed by SIGUSR1", ""),
    ],
)
def test_the_first_failure_decides_and_is_reported_last(
    how: str, code: int, last: str, place: str, fake_torch: object
) -> None:
    """The exit code and the last lines are of the rank that failed first, with its place."""
    ours = run_meshrun(*FOUR, PROGRAMS / "end.py", how)
    *before, cause, where = ours.stderr.splitlines()

    assert ours.returncode == code
    assert cause == f"error: rank 1 {last}"
    at = f"{PROGRAMS / 'end.py'}{place}".removeprefix(f"{os.getcwd()}/") if place else ""
    assert where.startswith(f"       {at}on {os.uname().nodename}, pid ")
    assert "meshrun: 3 ranks stopped as requested (0, 2, 3)" in before
    assert how != "text" or "the config is missing" not in before


@pytest.mark.parametrize(("how", "raised"), [("raise", "ValueError"), ("chain", "KeyError: 'lr'")])
def test_the_traceback_is_pythons(how: str, raised: str, fake_torch: object) -> None:
    """Printed once, complete, and without frames of meshrun."""
    ours = run_meshrun(*FOUR, PROGRAMS / "end.py", how)

    assert ours.stderr.count("Traceback (most recent call last):") == (2 if how == "chain" else 1)
    assert raised in ours.stderr
    assert f'File "{PROGRAMS / "end.py"}", line' in ours.stderr
    assert "/meshrun/worker/" not in ours.stderr


def test_ranks_that_fail_alike_are_merged(fake_torch: object) -> None:
    """A traceback common to all ranks is printed once."""
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
def test_no_process_outlives_a_kill(
    victim: str, extra: list[str], fake_torch: object, tmp_path: Path
) -> None:
    """Whichever process is killed, and whatever the ranks started or ignore."""
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


def test_a_zygote_that_starts_as_the_launcher_is_killed_imports_no_torch(
    fake_torch: Path, tmp_path: Path
) -> None:
    """The kernel does not report the end of a parent that ended before it was asked to."""
    env = run_at_startup(
        tmp_path,
        "import os, signal, sys\n"
        "if 'zygote' in sys.orig_argv: os.kill(os.getpid(), signal.SIGSTOP)\n",
    )
    with start_meshrun(*FOUR, PROGRAMS / "wait.py", env=env, folder=tmp_path) as running:
        zygote = psutil.Process(running.zygote())
        wait_for_states([zygote], stopped=True)
        running.signal(signal.SIGKILL)
        assert running.wait() == 137
        zygote.resume()
        wait_until(lambda: not zygote.is_running(), zygote.status)

    assert not fake_torch.exists()


def test_a_process_that_withdraws_ends_if_its_launcher_was_killed_before_it_could_know() -> None:
    """It would otherwise tell other nodes forever."""
    words = own_command("withdraw", "0")  # the id of no parent
    ended = subprocess.run(words, stdin=subprocess.DEVNULL, check=False)

    assert ended.returncode == -signal.SIGKILL


@pytest.mark.parametrize("method", ["fork", "exec"])
@pytest.mark.parametrize("first", ["launcher", "zygote"])
def test_no_process_outlives_launcher_and_zygote(
    first: str, method: str, fake_torch: object, tmp_path: Path
) -> None:
    """Both are killed at once, so that neither can clean up after the other."""
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
def test_a_signal_ends_the_ranks_and_then_the_launcher(
    signum: signal.Signals, fake_torch: object, tmp_path: Path
) -> None:
    """The launcher ends by the same signal, so that the shell sees it."""
    with start(tmp_path) as running:
        running.wait_for("up", 4)
        running.signal(signum)

        assert running.wait() == 128 + signum
    assert running.stderr.splitlines()[0].startswith(f"meshrun: {signum.name}: stopping 4 ranks")


def test_deaf_ranks_are_killed_after_the_grace_period(fake_torch: object, tmp_path: Path) -> None:
    """--shutdown-timeout limits how long ranks may ignore SIGTERM."""
    with start(tmp_path, "deaf") as running:
        running.wait_for("up", 4)
        running.signal(signal.SIGTERM)

        assert running.wait() == 143


@pytest.mark.parametrize("pause_s", [0.001, pytest.param(0.0, marks=pytest.mark.nightly)])
def test_a_storm_of_ctrl_c_leaves_no_folder(
    pause_s: float, fake_torch: object, tmp_path: Path
) -> None:
    """However often it is pressed during cleanup; the fixture checks for the folder."""
    with start(tmp_path) as running:
        running.wait_for("up", 4)
        while running.process.poll() is None:
            running.signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                running.process.wait(pause_s)

        assert running.wait() == 130


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("words", "code"),
    [((*FOUR, PROGRAMS / "end.py", "7"), 7), (("--ssh", "false", "--hosts", "elsewhere", "-"), 69)],
)
def test_a_signal_after_the_decision_changes_no_code(
    words: tuple[str | Path, ...],
    code: int,
    signum: signal.Signals,
    fake_torch: object,
    tmp_path: Path,
) -> None:
    """As from `srun --kill-on-bad-exit`, while this launcher is about to end by itself."""
    with start_meshrun(*words, folder=tmp_path) as running:
        wait_until(lambda: "\nerror: " in running.stderr, lambda: running.stderr)
        running.signal(signum)

        assert running.wait() == code


def test_nohup_is_respected(fake_torch: object, tmp_path: Path) -> None:
    """A SIGHUP that is ignored at the start stays ignored, in ranks too."""
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
    """There are no ranks to wait for yet."""
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
    """A zygote that does not answer is killed, and its ranks with it."""
    with start(tmp_path) as running:
        running.wait_for("up", 4)
        os.kill(running.zygote(), signal.SIGSTOP)
        running.signal(signal.SIGTERM)

        assert running.wait() == 143


def test_a_stopped_zygote_wakes_when_the_launcher_is_killed(
    fake_torch: object, tmp_path: Path
) -> None:
    """It still kills everything below it."""
    with start(tmp_path, "children") as running:
        running.wait_for("up", 4)
        os.kill(running.zygote(), signal.SIGSTOP)
        running.signal(signal.SIGKILL)

        assert running.wait() == 137


def test_children_from_before_the_launch_are_left_alone(fake_torch: object, tmp_path: Path) -> None:
    """A shell that execs meshrun may leave it children."""
    ready = tmp_path / "ready"
    result = run_in_shell(f'sleep 300 & echo $! > {ready}; exec "$@"', tmp_path)
    bystander = int(ready.read_text())

    assert result == 137
    os.kill(bystander, 0)
    os.kill(bystander, signal.SIGKILL)


def run_in_shell(script: str, tmp_path: Path) -> int:
    """Run a script that execs a launch, kill its zygote, and return the exit code."""
    with open(tmp_path / "stdout", "wb") as out, open(tmp_path / "stderr", "wb") as err:
        process = subprocess.Popen(
            ["sh", "-c", script, "sh", *command(*FOUR, PROGRAMS / "wait.py")],
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    running = Running(process, tmp_path)
    running.wait_for("up", 4)
    zygote = next(
        child.pid
        for child in psutil.Process(process.pid).children()
        if "meshrun zygote" in " ".join(child.cmdline())
    )
    os.kill(zygote, signal.SIGKILL)
    return running.wait()


def test_what_ranks_leave_behind_is_killed_and_reported(fake_torch: object, tmp_path: Path) -> None:
    """Even if every rank succeeded."""
    program = tmp_path / "leave.py"
    program.write_text(
        "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    )
    ours = run_meshrun("--nproc-per-node", "2", program)

    assert ours.returncode == 0
    assert ours.stderr == f"meshrun: killed 2 processes {LEFT_BEHIND}\n"


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
    """The launch keeps its exit code and last line, unless it has no other error."""
    (folder := tmp_path / "reports").mkdir()
    (program := tmp_path / "late.py").write_text(f"import os, sys\nos.rmdir(sys.argv[1])\n{end}\n")
    ours = run_meshrun("--report", folder / "report.json", program, folder)
    lines = [line for line in ours.stderr.splitlines() if line.startswith(("error:", "meshrun:"))]

    assert ours.returncode == code
    assert last in lines[-1], ours.stderr
    assert any("--report: folder " in line for line in lines)


def test_a_launch_ends_as_usual_though_meshrun_was_removed(
    fake_torch: object, tmp_path: Path
) -> None:
    """Such as by an upgrade of a shared environment: what the end needs is already imported."""
    copy, report = tmp_path / "lib" / "meshrun", tmp_path / "report.json"
    shutil.copytree(ROOT / "meshrun", copy)
    program = tmp_path / "program.py"
    program.write_text(f"import shutil\nshutil.rmtree({str(copy)!r})\n")
    ours = run_meshrun(
        "--report", report, "--timings", program,
        env={"PYTHONPATH": f"{FAKES}:{copy.parent}"}, cwd=tmp_path,
    )  # fmt: skip

    assert ours.returncode == 0, ours.stderr
    assert not copy.exists()
    assert json.loads(report.read_text())["exit_code"] == 0
    assert "mesh ready, program starts" in ours.stderr


def test_a_rank_that_raised_and_cannot_end_exits_with_one(
    fake_torch: object, tmp_path: Path
) -> None:
    """A thread keeps it alive; it is killed after the grace period, and the code stays 1.

    Python's resource tracker outlives it, to free its shared memory.
    """
    program = tmp_path / "thread.py"
    program.write_text(
        "import os, signal, threading\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "if os.environ['RANK'] == '1': signal.pause()\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "block = SharedMemory(create=True, size=8)\n"
        "print(f'/dev/shm/{block.name}', flush=True)\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "raise ValueError('slow')\n"
    )
    words = ("--nproc-per-node", "2", "--no-prefix", "--shutdown-timeout", "0.5", program)
    ours = run_meshrun(*words)

    assert ours.returncode == 1
    assert "raised ValueError: slow, exit code 1" in ours.stderr
    assert not os.path.exists(ours.stdout.strip())


@pytest.mark.parametrize(("signum", "name"), [(15, "SIGTERM"), (2, "Ctrl-C, SIGINT")])
def test_a_failure_before_a_signal_is_reported(
    signum: int, name: str, fake_torch: object, tmp_path: Path
) -> None:
    """With its traceback, but the last line and the exit code are the signal's."""
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
    stderr = running.stderr
    # when it happens, in the traceback, and in the final report
    assert stderr.count("ValueError: the loss is nan") == 3, stderr
    assert 'fails.py", line 4, in <module>' in stderr
    assert stderr.endswith(f"\nmeshrun: stopped by {name}\n")


@pytest.mark.parametrize("method", ["fork", "exec"])
def test_exit_handlers_registered_before_meshrun_run_last(
    method: str, fake_torch: object, tmp_path: Path
) -> None:
    """Startup hooks register them; coverage's saves its data."""
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


def test_c_exit_handlers_run_if_named_shared_memory_would_stay(
    fake_torch: object, tmp_path: Path
) -> None:
    """vLLM's, on a CPU: with it there, each later launch fails."""
    program = tmp_path / "program.py"
    program.write_text(
        "import ctypes, mmap, os, sys\n"
        "name = ctypes.create_string_buffer(b'/dev/shm/meshrun-%d' % os.getpid())\n"
        "with open(name.value, 'w+b') as file:\n"
        "    file.truncate(4096)\n"
        "    sys.kept = mmap.mmap(file.fileno(), 4096), name\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.__cxa_atexit(libc.unlink, name, None)\n"
        "print(name.value.decode())\n"
        "sys.exit(3)\n"
    )
    ours = run_meshrun("--nproc-per-node", "1", "--no-prefix", program)

    assert ours.returncode == 3, ours.stderr
    assert ours.stdout.startswith("/dev/shm/meshrun-")
    assert not os.path.exists(ours.stdout.strip())


def test_the_end_runs_no_code_of_modules(fake_torch: object, tmp_path: Path) -> None:
    """Not JAX's gc callback, whose module is cleared by then, nor SpeechBrain's lazy imports."""
    program = tmp_path / "program.py"
    program.write_text(
        "import gc, os, sys, types\n"
        "class Lazy(types.ModuleType):\n"
        "    def __getattribute__(self, name): raise ImportError(name)\n"
        "sys.modules['lazy'] = Lazy('lazy')\n"
        "def called(*_, of=sys.modules[__name__]): os.getpid()\n"
        "gc.callbacks.append(called)\n"
    )
    python = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    ours = run_meshrun("--nproc-per-node", "2", program)

    assert (ours.returncode, ours.stderr) == (python.returncode, python.stderr) == (0, "")


def test_alarms_of_a_program_do_not_go_off_while_its_rank_waits_for_peers() -> None:
    """With ``python``, they would end with the process."""
    program = (
        "import faulthandler, os, signal, threading\n"
        "from types import SimpleNamespace\n"
        "from meshrun.worker.exit import ExitHandler\n"
        "ending = ExitHandler()\n"
        "ending._reporter = SimpleNamespace(report=lambda _: None)\n"
        "ending._barrier_fd, others = os.pipe()\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.1)\n"
        "faulthandler.dump_traceback_later(0.1, exit=True)\n"
        "threading.Timer(0.3, os.close, (others,)).start()\n"
        "ending._wait_for_peers()\n"
    )
    waited = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)

    assert waited.returncode == 0, waited.stderr


def test_a_busy_daemon_thread_does_not_keep_a_rank(fake_torch: object, tmp_path: Path) -> None:
    """The rank's end waits for the interpreter's lock whenever it closes a file."""
    program = tmp_path / "busy.py"
    program.write_text(
        "import tempfile, threading\n"
        "def count():\n"
        "    while True:\n"
        "        sum(range(1000))\n"
        "files = [tempfile.TemporaryFile() for _ in range(9)]\n"
        "for file in files:\n"
        "    file.write(b'unwritten')\n"
        "threading.Thread(target=count, daemon=True).start()\n"
    )
    ours = run_meshrun("--nproc-per-node", "2", program)
    assert (ours.returncode, ours.stderr) == (0, "")


def test_a_rank_that_is_out_of_memory_ends_as_any_other(fake_torch: object, tmp_path: Path) -> None:
    """As under ``ulimit -v``; the memory that the program frees is enough for the rest."""
    program = tmp_path / "hungry.py"
    program.write_text(
        "import functools, gc, pathlib\n"
        "file = open(pathlib.Path(__file__).with_name('log'), 'w')\n"
        "file.write('all of it')\n"
        "gc.get_objects = functools.partial(exec, 'raise MemoryError')\n"
        "gc.get_objects()\n"
    )
    ours = run_meshrun(program)

    assert ours.returncode == 1
    assert "Exception ignored" not in ours.stderr
    assert "error: rank 0 raised MemoryError" in ours.stderr
    assert (tmp_path / "log").read_text() == "all of it"
