"""Machines that lack something: a clear error, and no process left behind."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kit import (
    ENDED_TOO,
    FAKES,
    MARK,
    PROGRAMS,
    STORE,
    TOO_FEW_FILES,
    ZYGOTE,
    command,
    marked_processes,
    run_at_startup,
    run_meshrun,
    start_meshrun,
    wait_until,
    within,
)

CALLER = """\
import resource, sys
import meshrun

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), -1))
try:
    if sys.argv[1] == "group":
        meshrun.WorkerGroup()
    else:
        meshrun.launch(sys.exit, args=(3,))
except meshrun.MeshrunError as error:
    print(f"{type(error).__name__}: {error}")
"""
RANKS = 4
NEEDED = 3 + RANKS
"""Processes: launcher, zygote, store, and the ranks."""


@pytest.mark.parametrize("room", range(1, NEEDED + 1))
def test_a_full_process_table(
    room: int, as_nobody: tuple[list[str], Path], fake_torch: object
) -> None:
    """Whichever process does not fit: the error names it, and the others are stopped."""
    words, folder = as_nobody
    # A program that ended at once would make room for the next rank.
    program = PROGRAMS / ("echo.py" if room == NEEDED else "wait.py")
    ours = subprocess.run(
        [*words, *command("--nproc-per-node", str(RANKS), program)],
        env={
            **os.environ,
            "PYTHONPATH": str(FAKES),
            "TMPDIR": str(folder),
            "FAKE_TORCH_IMPORTS": "",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NPROC, (room, room)),
    )
    wait_until(lambda: not marked_processes(os.environ[MARK]), lambda: ours.stderr)

    if room == NEEDED:
        assert (ours.returncode, len(ours.stdout.splitlines())) == (0, RANKS), ours.stderr
    else:
        assert ours.returncode == 71, ours.stderr
        assert re.search("could not be started|cannot start", ours.stderr), ours.stderr
        assert "hint: check `ulimit -u`, pids.max of the cgroup, and `free -h`: " in ours.stderr
    assert "Traceback" not in ours.stderr
    assert list(folder.iterdir()) == []


def test_too_many_threads(as_nobody: tuple[list[str], Path], fake_torch: object) -> None:
    """The report of a rank that cannot start a thread names the limits."""
    words, folder = as_nobody
    program = folder / "threads.py"
    program.write_text(
        "import threading, time\n"
        "for _ in range(100):\n"
        "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    ours = subprocess.run(
        [*words, *command("--nproc-per-node", "1", program)],
        env={**os.environ, "TMPDIR": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NPROC, (20, 20)),
    )

    assert ours.returncode == 1, ours.stderr
    assert (
        "error: rank 0 raised RuntimeError: can't start new thread"
        " (possibly at a limit: see `ulimit -u`, `ulimit -v` and pids.max of the cgroup), exit"
    ) in ours.stderr, ours.stderr


@pytest.mark.parametrize(
    ("limit", "source", "end"),
    [
        (
            (resource.RLIMIT_AS, (1 << 33, 1 << 33)),
            "bytearray(1 << 40)",
            "raised MemoryError (`ulimit -v` is 8388608: 8.0 GiB for each process), exit code 1",
        ),
        pytest.param(
            (resource.RLIMIT_CPU, (2, 2)),
            "while True: pass",
            "was killed by SIGKILL (possibly at the limit of CPU time: `ulimit -t` is 2 s)",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            (resource.RLIMIT_CPU, (2, 1000)),
            "while True: pass",
            "was killed by SIGXCPU (at the limit of CPU time, of `ulimit -t` or of the job)",
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["memory", "CPU time", "warned of CPU time"],
)
def test_a_rank_at_a_limit(
    limit: tuple[int, tuple[int, int]], source: str, end: str, fake_torch: object, tmp_path: Path
) -> None:
    """The report names the limit and its value."""
    (program := tmp_path / "needs.py").write_text(f"{source}\n")
    ours = run_meshrun(program, preexec_fn=lambda: resource.setrlimit(*limit))

    assert ours.stderr.splitlines()[-2] == f"error: rank 0 {end}", ours.stderr


def test_a_process_of_meshrun_at_a_limit(fake_torch: object, tmp_path: Path) -> None:
    """The store's, which the kernel's out-of-memory killer may choose too, names it likewise."""
    with start_meshrun(PROGRAMS / "wait.py", folder=tmp_path) as running:
        running.wait_for("up")
        resource.prlimit(running.process.pid, resource.RLIMIT_CPU, (5000, 5000))
        os.kill(running.below_zygote()[0], signal.SIGKILL)

        assert running.wait() == 71
    last = running.stderr.splitlines()[-1]
    assert last == (
        f"error: {STORE} was killed by SIGKILL"
        " (possibly at the limit of CPU time: `ulimit -t` is 5000 s), and the ranks need it"
    )


def test_a_preload_without_memory(fake_torch: object, tmp_path: Path) -> None:
    """Its traceback follows the limits to check."""
    (tmp_path / "huge.py").write_text("raise MemoryError\n")
    path = f"{tmp_path}:{os.environ['PYTHONPATH']}"
    ours = run_meshrun("--preload", "huge", PROGRAMS / "echo.py", env={"PYTHONPATH": path})

    assert (ours.returncode, ours.stderr.splitlines()[-1]) == (1, "MemoryError")
    assert ours.stderr.startswith(
        "meshrun: this machine is out of memory; check `free -h`, `ulimit -v`, and the memory"
    )


def test_no_room_for_the_logs_of_a_restart(fake_torch: object, tmp_path: Path) -> None:
    """The launch fails as if a rank could not be started."""
    program = tmp_path / "fails.py"
    program.write_text(
        "import os, pathlib\n"
        "attempt = pathlib.Path(os.environ['TORCHELASTIC_ERROR_FILE']).parents[1]\n"
        "attempt.with_name('attempt_1').touch()\n"
        "raise ValueError('first')\n"
    )
    words = ("--max-restarts", "1", "--log-dir", tmp_path / "logs", "-t", "3", program)
    ours = run_meshrun(*words)

    assert ours.returncode == 71, ours.stderr
    assert "restart 1 of 1, because rank 0 raised ValueError: first" in ours.stderr
    *_, hint, _, error = ours.stderr.splitlines()
    assert hint.startswith("hint: set TMPDIR or --log-dir"), ours.stderr
    assert ours.stderr.count("cannot create") == 1
    assert re.fullmatch(r"error: cannot create `.*/attempt_1`: Not a directory", error)


LONG = "9" * 100_000


@pytest.mark.parametrize(
    ("words", "env", "code", "message"),
    [
        (
            ["--rdzv-id", LONG],
            {},
            2,
            "--rdzv-id must be at most 1024 characters, found 100000",
        ),
        (["--role", LONG], {}, 2, "--role must be at most 1024 characters, found 100000"),
        (
            [],
            {"OPENBLAS_NUM_THREADS": LONG, "GOTO_NUM_THREADS": LONG},
            71,
            "a rank's environment takes 20",
        ),
        (
            ["--max-restarts", "5"],
            {"OPENBLAS_NUM_THREADS": LONG, "GOTO_NUM_THREADS": LONG},
            71,
            "       not restarted: twice in a row, no rank could be started\n",
        ),
    ],
    ids=["id", "role", "variables", "variables, with restarts"],
)
def test_values_that_are_too_long(
    words: list[str], env: dict[str, str], code: int, message: str, fake_torch: object
) -> None:
    """The zygote receives a rank's settings in one packet, whose size the kernel limits."""
    ours = run_meshrun(*words, PROGRAMS / "echo.py", env=env)

    assert (ours.returncode, ours.stdout) == (code, "")
    assert message in ours.stderr
    assert "Traceback" not in ours.stderr


def test_settings_that_do_not_fit_into_a_pipe(fake_torch: object) -> None:
    """They reach a rank with its own interpreter too."""
    env = {"OPENBLAS_NUM_THREADS": LONG}
    ours = run_meshrun("--start-method", "exec", PROGRAMS / "echo.py", env=env)

    assert (ours.returncode, ours.stdout) == (0, "[rank 0] out 0\n"), ours.stderr


@pytest.mark.parametrize("limit", [5, 6, 8, 20])
@pytest.mark.parametrize("words", [[], ["--hosts", "localhost"]])
def test_a_limit_of_open_files_that_is_too_low(
    limit: int, words: list[str], fake_torch: object
) -> None:
    """Whichever file would have been one too many."""
    ours = run_meshrun(
        *(*words, PROGRAMS / "echo.py"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
    )

    assert (ours.returncode, ours.stdout) == (71, "")
    assert f"{TOO_FEW_FILES} {limit}" in ours.stderr
    assert "Traceback" not in ours.stderr


@pytest.mark.parametrize("free", [4, 8, 10, 12])
def test_descriptors_that_a_parent_left_open(free: int, fake_torch: object) -> None:
    """They count towards the limit; reaching it anywhere is not reported as a bug."""

    def leave_open() -> None:
        limit = 256
        os.closerange(3, limit)  # those of other tests, which close only as the launcher starts
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        with suppress(OSError):
            while True:
                os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)
        os.closerange(limit - free, limit)

    ours = run_meshrun(
        *("--nproc-per-node", "2", PROGRAMS / "echo.py"), preexec_fn=leave_open, close_fds=False
    )

    assert (ours.returncode, ours.stdout) == (71, ""), ours.stderr
    error, empty, hint = ours.stderr.splitlines()
    assert error.startswith("error: ")
    assert error.endswith(": Too many open files")
    assert (empty, hint) == ("", "hint: raise the limit with `ulimit -n`, which is 256")


@pytest.mark.parametrize("free", range(1, 6))
def test_a_zygote_without_descriptors(free: int, fake_torch: object, tmp_path: Path) -> None:
    """Such as when a module opens files: orders arrive without the descriptors for ranks."""
    (tmp_path / "opens.py").write_text(
        "import os, resource\n"
        "highest = os.dup(0)\n"
        "os.close(highest)\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (highest + {free},) * 2)\n"
    )
    env = {"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{tmp_path}"}
    ours = run_meshrun("--preload", "opens", PROGRAMS / "echo.py", env=env)

    assert ours.returncode == 71, ours.stderr
    assert "Too many open files" in ours.stderr
    assert "Traceback" not in ours.stderr


def run_refusing(
    folder: Path, refused: str, error: str, program: str = "echo.py"
) -> subprocess.CompletedProcess[str]:
    """Launch a program after a module is preloaded with which ``refused`` raises an error."""
    (folder / "refuses.py").write_text(
        "import errno, os, socket, torch.distributed\n"
        "def system(number): return OSError(number, os.strerror(number))\n"
        f"def refuse(*_, **__): raise {error}\n"
        f"{refused} = refuse\n"
    )
    env = {"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{folder}"}
    return run_meshrun("--preload", "refuses", PROGRAMS / program, env=env)


def test_a_fork_that_fails_early_does_not_act_as_a_second_zygote(
    fake_torch: object, tmp_path: Path
) -> None:
    """It prints why and exits; only the zygote reports to the launcher."""
    ours = run_refusing(tmp_path, "os.dup2", "system(errno.EMFILE)")

    assert ours.returncode == 71, ours.stderr
    assert "meshrun: cannot start: Too many open files\n" in ours.stderr
    assert "error: rank 0 exited with code 71" in ours.stderr
    assert "Traceback" not in ours.stderr


@pytest.mark.parametrize("call", ["socket.recv_fds", "os.pipe"])
def test_a_zygote_without_memory(call: str, fake_torch: object, tmp_path: Path) -> None:
    """The error says so, without a traceback of meshrun."""
    ours = run_refusing(tmp_path, call, "system(errno.ENOMEM)")
    first, *_, error = ours.stderr.splitlines()

    assert ours.returncode == 71, ours.stderr
    assert first.startswith(
        "meshrun: the operating system refused what meshrun needs: Cannot alloc"
    )
    assert error.startswith(f"error: {ZYGOTE} exited with code 71")
    assert "Traceback" not in ours.stderr


@pytest.mark.nightly
def test_a_zygote_whose_system_calls_are_refused(fake_torch: object, tmp_path: Path) -> None:
    """By a seccomp profile, before it has done anything: getsockopt(2)."""
    env = run_at_startup(
        tmp_path,
        "import errno, os, socket\n"
        "class Refusing(socket.socket):\n"
        "    def __init__(self, *words, fileno=None, **more):\n"
        "        if fileno is not None: raise OSError(errno.EPERM, os.strerror(errno.EPERM))\n"
        "        super().__init__(*words, **more)\n"
        "socket.socket = Refusing\n",
    )
    ours = run_meshrun(PROGRAMS / "echo.py", env=env)

    assert ours.returncode == 71, ours.stderr
    assert "Operation not permitted; see the seccomp profile" in ours.stderr
    assert "Traceback" not in ours.stderr


def test_a_store_that_cannot_start_a_thread(fake_torch: object, tmp_path: Path) -> None:
    """As at pids.max of a cgroup: one line says why the process that hosts it exited."""
    error = "RuntimeError('Resource temporarily unavailable')"
    ours = run_refusing(tmp_path, "torch.distributed.TCPStore", error, "wait.py")
    *before, error = ours.stderr.splitlines()

    assert ours.returncode == 71, ours.stderr
    assert any(
        line.startswith("meshrun: cannot serve the ranks' store: Resource temporarily unavailable;")
        for line in before
    ), ours.stderr
    assert error.startswith(f"error: {STORE} exited with code 71")
    assert "Traceback" not in ours.stderr


def test_a_process_killed_for_lack_of_memory(fake_torch: object, tmp_path: Path) -> None:
    """The cause says so if the process that starts the ranks reaches the limit of a cgroup."""
    group = Path("/sys/fs/cgroup/memory", f"meshrun_test_{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(1 << 28))
    except OSError as error:
        pytest.skip(f"cannot create a memory cgroup here: {error}")
    (tmp_path / "eats.py").write_text("keep = []\nwhile True: keep.append(b'x' * (1 << 24))\n")
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"}
    inside = ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
    try:
        ours = run_meshrun("--preload", "eats", PROGRAMS / "echo.py", env=env, around=inside)
    finally:
        group.rmdir()

    assert ours.returncode == 137, ours.stderr
    assert ours.stderr == (
        f"error: {ZYGOTE} was killed by SIGKILL (out of memory: the kernel"
        f" killed 1 process at this job's limit of 0.2 GiB), {ENDED_TOO}\n"
    )


def test_a_kernel_without_memfd_create(tmp_path: Path, fake_torch: object) -> None:
    """A sandbox may refuse it; stacks then go to a temporary file."""
    env = run_at_startup(
        tmp_path,
        "import ctypes\n"
        "class Refusing(ctypes.CDLL):\n"
        "    def memfd_create(self, *_): return -1\n"
        "ctypes.CDLL = Refusing\n",
    )
    ours = run_meshrun(PROGRAMS / "echo.py", env=env)

    assert (ours.returncode, ours.stdout) == (0, "[rank 0] out 0\n"), ours.stderr


def test_without_a_temporary_folder_the_error_says_what_to_set(fake_torch: object) -> None:
    """A launch without files needs no temporary folder."""
    bind = 'mount --bind "$d" "$d" && mount -o remount,ro,bind "$d"'
    each = f'for d in /tmp /var/tmp; do [ ! -d "$d" ] || {{ {bind}; }} || exit; done; cd /proc'
    read_only = within("--mount", prepare=each)
    env = {"TMPDIR": "", "FAKE_TORCH_IMPORTS": ""}
    words = ("--nproc-per-node", "2", PROGRAMS / "echo.py")
    ours = run_meshrun(*words, around=read_only, env=env)
    without_files = run_meshrun("--log-dir", os.devnull, *words, around=read_only, env=env)

    assert (ours.returncode, ours.stdout) == (71, "")
    assert ": Read-only file system" in ours.stderr
    assert "hint: set TMPDIR or --log-dir to a writable folder" in ours.stderr
    assert "Traceback" not in ours.stderr
    assert without_files.returncode == 0, without_files.stderr
    assert sorted(without_files.stdout.splitlines()) == ["[rank 0] out 0", "[rank 1] out 1"]


@pytest.mark.parametrize(
    ("call", "room", "message"),
    [
        ("launch", (3, 10_000), "cannot write to the temporary folder"),
        ("launch", (100, 500), "the launcher exited with code 3 before it could report a result"),
        ("group", (4, 10_000), "cannot write to the temporary folder"),
    ],
)
def test_a_caller_without_disk_space_gets_a_host_error(
    call: str, room: tuple[int, int], message: str, fake_torch: object, tmp_path: Path
) -> None:
    """Calls and results are files; a truncated report does not count as one."""
    inodes, size = room
    (script := tmp_path / "caller.py").write_text(CALLER)
    (small := tmp_path / "small").mkdir()
    mount = f"mount -t tmpfs -o nr_inodes={inodes} none {small}"
    around = within("--user", "--map-root-user", "--mount", prepare=mount)
    ran = subprocess.run(
        [*around, sys.executable, script, call, str(size)],
        env={**os.environ, "TMPDIR": str(small), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.stdout.startswith(f"HostError: {message}"), ran


@pytest.mark.parametrize(
    ("namespace", "prepare", "message"),
    [
        (
            "--mount",
            'd=$(mktemp -d) && cd "$d" && rmdir "$d"',
            "the current folder no longer exists",
        ),
        ("--net", ":", "this machine cannot connect to its own address `127.0.0.1`: Network is"),
        ("--mount", "mount -t tmpfs none /proc", "/proc is not mounted"),
    ],
    ids=["folder", "loopback", "proc"],
)
def test_what_every_launch_needs_is_checked_first(
    namespace: str, prepare: str, message: str, fake_torch: Path
) -> None:
    """An error with a hint before anything starts, without a traceback or a wait."""
    words = ("--nproc-per-node", "2", PROGRAMS / "echo.py")
    ours = run_meshrun(*words, around=within(namespace, prepare=prepare))
    error, empty, hint = ours.stderr.splitlines()

    assert ours.returncode == 71
    assert error.startswith(f"error: {message}")
    assert (empty, hint[:6]) == ("", "hint: ")
    assert not fake_torch.exists()


@pytest.mark.parametrize(
    "words",
    [("--watch",), ("--report", "report"), ("--hosts", "a"), ("--submit", "slurm", "--dry-run")],
)
def test_no_launch_starts_in_a_folder_that_was_removed(
    words: tuple[str, ...], fake_torch: Path
) -> None:
    """In any way of launching."""
    removed = ("sh", "-c", 'cd "$(mktemp -d)" && rmdir "$PWD" && exec "$@"', "sh")
    ours = run_meshrun(*words, PROGRAMS / "echo.py", around=removed)

    assert ours.returncode == 71
    assert ours.stderr.startswith("error: the current folder no longer exists\n")
    assert not fake_torch.exists()
