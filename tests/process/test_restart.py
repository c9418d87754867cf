"""Restarts after a failure: the same zygote starts a new generation of all ranks."""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kit import ENDED_TOO, PROGRAMS, STORE, ZYGOTE, run_meshrun, start_meshrun, wait_until
from tests.nvml import card

AGAIN = PROGRAMS / "generations.py"


@pytest.mark.parametrize("how", ["SIGKILL", "3", "raise"])
@pytest.mark.parametrize("method", ["fork", "exec"])
def test_a_failure_restarts_all_ranks(how: str, method: str, fake_torch: Path) -> None:
    """If the last generation succeeds, so does the launch."""
    ours = run_meshrun(
        "--nproc-per-node", "3", "--max-restarts", "3", "--start-method", method, "--no-prefix",
        AGAIN, "2", how,
    )  # fmt: skip

    assert ours.returncode == 0, ours.stderr
    counts = [
        sum(line.startswith(f"generation {number} ") for line in ours.stdout.splitlines())
        for number in range(4)
    ]
    assert counts[2:] == [3, 0]
    assert "restart 1 of 3, because rank 1 " in ours.stderr
    assert "restart 2 of 3 in 1 s, because rank 1 " in ours.stderr
    assert "generation 2 is running, " in ours.stderr
    if method == "fork":
        assert len(fake_torch.read_text().splitlines()) == 1  # one import for all generations


def test_restarts_are_limited(fake_torch: object) -> None:
    """The exit code is the last failure's."""
    ours = run_meshrun("--nproc-per-node", "2", "--max-restarts", "1", AGAIN, "9", "3")

    assert ours.returncode == 3
    assert "after 1 restart" in ours.stderr.splitlines()[-1]


def test_the_report_is_of_the_last_failure(fake_torch: object, tmp_path: Path) -> None:
    """Its stack and last lines, and nothing of the first generation's other failure."""
    program = tmp_path / "program.py"
    program.write_text(
        "import ctypes, os, signal, sys\n"
        "rank, again = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "if rank == again:\n"
        "    print('last words of generation', again, file=sys.stderr)\n"
        "    sys.exit(4) if again == '0' else ctypes.string_at(0)\n"
        "signal.pause()\n"
    )
    report = tmp_path / "report.json"
    words = ("--nproc-per-node", "2", "--max-restarts", "1", "--report", report)
    ours = run_meshrun(*words, program)
    result = json.loads(report.read_text())
    first = result["failures"][0]
    _, end = ours.stderr.split("because rank 0 exited with code 4\n")

    assert ours.returncode == 139
    assert "restart 1 of 1, because rank 0 exited with code 4" in ours.stderr
    assert "rank 1, Python stack at the crash:" in end
    assert "last words of generation 1\n" in end
    assert "generation 0" not in end
    assert "after 1 restart" in end.splitlines()[-1]
    assert (result["restarts"], first["rank"], first["signum"]) == (1, 1, signal.SIGSEGV)
    assert first["last_lines"] == ["last words of generation 1"]
    assert f"{program}:5 in <module>" in first["stack"][0]


def test_a_traceback_is_printed_before_the_restart(fake_torch: object) -> None:
    """Otherwise, nobody would ever see it."""
    ours = run_meshrun("--nproc-per-node", "2", "--max-restarts", "1", AGAIN, "1", "raise")

    assert ours.returncode == 0
    assert ours.stderr.count("ValueError: the loss is nan\nmeshrun: generation 1 is running") == 1


def test_each_generation_has_its_own_files(fake_torch: object, tmp_path: Path) -> None:
    """In torchrun's attempt folders."""
    logs = tmp_path / "logs"
    run_meshrun(
        "--nproc-per-node", "2", "--max-restarts", "2", "-t", "3", "--log-dir", logs, AGAIN, "1",
        "raise",
    )  # fmt: skip
    (run,) = logs.iterdir()

    assert (run / "attempt_0" / "1" / "error.json").exists()
    assert (run / "attempt_1" / "1" / "stdout.log").read_text().startswith("generation 1")


@pytest.mark.parametrize("named", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_log_files_that_were_removed_do_not_prevent_a_restart(
    named: bool, fake_torch: object, tmp_path: Path
) -> None:
    """The folder is created again, in --log-dir or in the temporary folder."""
    logs = tmp_path / "logs"
    logs.mkdir()
    program = tmp_path / "cleans_up.py"
    program.write_text(
        "import os, shutil, sys\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    shutil.rmtree(sys.argv[1])\n"
        "    sys.exit(3)\n"
        "print('again', flush=True)\n"
        "sys.exit(4)\n"
    )
    where = ["--log-dir", logs] if named else []
    ours = run_meshrun(
        *("--max-restarts", "1", "-t", "3", *where, program, logs),
        env={} if named else {"TMPDIR": str(logs)},
    )

    assert ours.returncode == 4, ours.stderr
    (log,) = logs.glob("*/attempt_1/0/stdout.log")
    assert log.read_text() == "again\n"


def test_a_missing_module_is_not_tried_for_ever(fake_torch: object, tmp_path: Path) -> None:
    """After the second failure, another start is useless."""
    program = tmp_path / "program.py"
    program.write_text("import no_such_module\n")
    ours = run_meshrun("--nproc-per-node", "2", "--max-restarts", "9", program)

    assert ours.returncode == 1
    assert "not restarted: it raised ModuleNotFoundError" in ours.stderr
    assert ours.stderr.count("restart 1 of 9") == 1
    assert "restart 2 of 9" not in ours.stderr


def test_a_program_that_cannot_be_parsed_is_not_restarted(
    fake_torch: object, tmp_path: Path
) -> None:
    """A syntax error is found before any rank starts."""
    program = tmp_path / "program.py"
    program.write_text("def (:\n")
    ours = run_meshrun("--max-restarts", "9", program)

    assert ours.returncode == 1
    assert "restart" not in ours.stderr


@pytest.mark.parametrize(
    ("victim", "method", "extra"),
    [("store", "fork", "deaf"), ("zygote", "fork", "children"), ("zygote", "exec", "children")],
)
def test_a_killed_process_of_meshrun_is_restarted_and_named(
    victim: str, method: str, extra: str, fake_torch: Path, tmp_path: Path
) -> None:
    """The cause is that process, not the ranks that end with it; none of them is left behind."""
    words = ("--nproc-per-node", "2", "--max-restarts", "1", "--shutdown-timeout", "1")
    with start_meshrun(
        *words, "--start-method", method, PROGRAMS / "wait.py", extra, folder=tmp_path
    ) as running:
        running.wait_for("up", 2)
        zygote, (store, *_) = running.zygote(), running.below_zygote()
        before = psutil.Process(running.process.pid).children(recursive=True)
        os.kill(zygote if victim == "zygote" else store, signal.SIGKILL)
        running.wait_for("up", 4)
        left = [each.pid for each in before if each.is_running() and each.pid != zygote]
        again = running.zygote()
        running.process.terminate()

        assert running.wait() == 143
    assert left == []
    assert (again == zygote) == (victim == "store")
    why = f"{STORE if victim == 'store' else ZYGOTE} was killed by SIGKILL"
    assert f"meshrun: restart 1 of 1, because {why}\n" in running.stderr
    assert "meshrun: generation 1 is running, " in running.stderr


def test_a_zygote_that_is_killed_too_often_ends_the_launch(
    fake_torch: Path, tmp_path: Path
) -> None:
    """With its exit code; a zygote that is killed before ranks start counts too."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    env = {"FAKE_TORCH_WAITS": str(fifo)}
    words = ("--nproc-per-node", "2", "--max-restarts", "1", PROGRAMS / "wait.py")
    with start_meshrun(*words, env=env, folder=tmp_path) as running:
        with open(fifo, "w"):  # opens once the zygote is in the middle of its import
            zygote = running.zygote()
            os.kill(zygote, signal.SIGKILL)
            wait_until(lambda: not psutil.pid_exists(zygote), lambda: f"the end of {zygote}")
        with open(fifo, "w"):
            pass
        running.wait_for("up", 2)
        os.kill(running.zygote(), signal.SIGKILL)

        assert running.wait() == 137
    why = f"{ZYGOTE} was killed by SIGKILL"
    assert f"meshrun: restart 1 of 1, because {why}\n" in running.stderr
    assert f"error: {why}, {ENDED_TOO}\n" in running.stderr
    assert len(fake_torch.read_text().splitlines()) == 2


def test_a_signal_is_no_reason_to_restart(fake_torch: object, tmp_path: Path) -> None:
    """Whoever stops the launcher wants it stopped."""
    with start_meshrun(
        "--nproc-per-node", "2", "--max-restarts", "9", PROGRAMS / "wait.py", folder=tmp_path
    ) as running:
        running.wait_for("up", 2)
        running.process.terminate()

        assert running.wait() == 143
        assert "restart" not in running.stderr


def test_what_a_generation_left_behind_is_killed_first(fake_torch: object, tmp_path: Path) -> None:
    """A process that a failed rank has started does not live on beside the new ranks."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, subprocess, sys\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "    open(sys.argv[1], 'w').write(str(child.pid))\n"
        "    os._exit(1)\n"
        "print(os.path.exists('/proc/' + open(sys.argv[1]).read()))\n"
    )
    ours = run_meshrun("--max-restarts", "1", "--no-prefix", program, tmp_path / "pid")

    assert (ours.returncode, ours.stdout) == (0, "False\n")


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv"
)
def test_a_process_that_changed_its_user_does_not_prevent_a_restart(
    fake_torch: object, tmp_path: Path
) -> None:
    """Like a setuid program, it cannot be killed, so it is named and left running."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys\n"
        "again = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "if again == '0':\n"
        "    reader, writer = os.pipe()\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        os.setuid(65534)\n"
        "        os.write(writer, b'.')\n"
        "        signal.pause()\n"
        "    os.read(reader, 1)\n"
        "    sys.exit(3)\n"
        "print('generation', again)\n"
    )
    words = ("--nproc-per-node", "1", "--max-restarts", "1", "--no-prefix", program)
    ours = run_meshrun(*words, around=["setpriv", "--bounding-set", "-kill", "--"])
    found = re.search(r"meshrun: cannot kill process (\d+): owned by another user", ours.stderr)
    assert found is not None, ours.stderr
    os.kill(int(found[1]), signal.SIGKILL)

    assert (ours.returncode, ours.stdout) == (0, "generation 1\n")
    assert ours.stderr.count("cannot kill") == 1
    assert "state D" not in ours.stderr


def test_a_restart_waits_for_gpu_memory(
    fake_nvml: Callable[[list[Any]], None], tmp_path: Path
) -> None:
    """Of the launch's GPUs, up to the given time; messages name the processes that hold it."""
    mine, busy = card("GPU-0", 1, used=1 << 20), card("GPU-1", 2, used=9 << 30)
    held = {**mine, "used": 3 << 30, "processes": [[os.getpid(), 2 << 30], [2**22 + 1, None]]}
    fake_nvml([held, busy])
    words = ("--gpus", "0", "--nproc-per-node", "2", "--max-restarts", "1", AGAIN, "1", "3")

    with start_meshrun("--gpu-memory-wait", "512MiB,1h", *words, folder=tmp_path) as run:
        wait_until(lambda: "waiting up to" in run.stderr, lambda: run.stderr)
        assert "generation 1" not in run.stdout
        fake_nvml([mine, busy])
        assert run.wait() == 0, run.stderr
    assert (
        "waiting up to 3600 s for GPU memory in use to drop to 512 MiB: GPU 0 has 3.0 GiB in use"
        f" (pid {os.getpid()} ({Path('/proc/self/comm').read_text().strip()}) 2.0 GiB, not of this"
        " launch; pid 4194305, exited or in another container)"
    ) in run.stderr
    assert run.stdout.count("generation 1") == 2

    fake_nvml([held, busy])
    ours = run_meshrun("--gpu-memory-wait", "1GiB,100ms", *words)
    assert ours.returncode == 0, ours.stderr
    assert "restarting after 0.1 s although GPU 0 has 3.0 GiB in use" in ours.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_wait_for_memory_ends_with_the_launch(
    signum: int, fake_nvml: Callable[[list[Any]], None], tmp_path: Path
) -> None:
    """At once, without another start."""
    fake_nvml([card("GPU-0", 1, used=3 << 30)])
    words = ("--gpu-memory-wait", "512MiB,1h", "--nproc-per-node", "2", "--max-restarts", "1")

    with start_meshrun(*words, AGAIN, "1", "3", folder=tmp_path) as run:
        wait_until(lambda: "waiting up to" in run.stderr, lambda: run.stderr)
        run.signal(signum)
        assert run.wait() == 128 + signum
    assert "generation 1" not in run.stdout


@pytest.mark.nightly
def test_a_slow_disk_for_our_own_output_cancels_no_restart(
    fake_torch: object, tmp_path: Path
) -> None:
    """Time limits count from when the launcher learns of an end, however late that is."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\nwrite = os.write\n"
        "def slow(fd, data):\n"
        "    time.sleep(3 * (fd in (1, 2)))\n    return write(fd, data)\n"
        "os.write = slow\n"
    )
    (program := tmp_path / "program.py").write_text(
        "import os\n"
        "first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "for number in range(2):\n    print(number)\n"
        "if first and os.environ['RANK'] == '1':\n    raise ValueError('first')\n"
    )
    env = {"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{tmp_path}"}
    words = ("--nproc-per-node", "2", "--max-restarts", "1", program)
    with start_meshrun(*words, env=env, folder=tmp_path) as running:
        assert running.wait() == 0, running.stderr
