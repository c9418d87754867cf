"""Warm servers: runs from one, what makes one unusable, and kills of each process."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from meshrun.host.process_state import read_status
from meshrun.warm.server_folder import LiveServer, ServerFolder, default_server_folder
from tests.kit import (
    FAKES,
    PROGRAMS,
    command,
    run_meshrun,
    start_meshrun,
    wait_for_states,
    wait_until,
    within,
)

LIBRARY = """\
import os

with open(os.environ["LIBRARY_IMPORTS"], "a") as file:
    file.write(f"{os.getpid()}\\n")
WHERE = os.environ.get("LIBRARY_HOME", "home")
"""

ASKS = """\
import os, socket, sys
from meshrun.plan.rank_program import Program
from meshrun.protocol.packing import pack
from meshrun.warm.inherited import read_inherited
from meshrun.warm.warm_messages import ZygoteSpec
program = Program(kind="script", target="none.py")
spec = ZygoteSpec(program=program, mark="0" * 16, inherited=read_inherited(os.environ))
text = os.fdopen(os.memfd_create("spec"), "w+b")
text.write(pack(spec))
text.flush()
(control, ours), null = socket.socketpair(), os.open(os.devnull, os.O_RDWR)
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect(sys.argv[1])
try:
    fds = [text.fileno(), os.open("/", os.O_RDONLY), *[null] * 3, control.fileno()]
    socket.send_fds(server, [b"x"], [*fds, null, null])
    print("answered" if server.recv(1000) else "refused")
except ConnectionError:
    print("refused")
"""
LISTENS = """\
import os, socket, sys
os.unlink(sys.argv[1])
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o666)
listener.listen()
print("listening", flush=True)
print("got something" if listener.accept()[0].recv(1000) else "got nothing", flush=True)
"""
LIMITED = """\
import ctypes
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
"""


class Warm:
    """Runs with ``--warm`` whose servers are in a folder of the test."""

    def __init__(self, folder: Path, imports: Path) -> None:
        self.folder, self.imports = folder, imports

    def run(
        self, *args: str | Path, env: dict[str, str] | None = None, around: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end."""
        return run_meshrun("--warm", *args, env=env, around=around)

    def leave(self, *args: str | Path) -> int:
        """Run, and wait for the server that the run leaves; return its process id."""
        before = {found.server.pid for found in self.servers()}
        done = self.run(*args)
        assert "leaving a warm server" in done.stderr, done.stderr
        wait_until(
            lambda: bool(self.new(before) or self.why_none()),
            lambda: f"a server after {done.stderr}",
        )
        assert self.new(before), self.why_none()
        self.imports.unlink(missing_ok=True)
        return self.new(before)[0]

    def new(self, before: set[int]) -> list[int]:
        """Return the process ids of servers that did not exist before."""
        return [found.server.pid for found in self.servers() if found.server.pid not in before]

    def servers(self) -> list[LiveServer]:
        """Return the running servers."""
        if not os.path.isdir(default_server_folder()):
            return []
        folder = ServerFolder(default_server_folder())
        try:
            return folder.servers()
        finally:
            folder.close()

    def starting(self) -> list[int]:
        """Return the process ids of servers that are still importing."""
        folder = ServerFolder(default_server_folder())
        try:
            return folder.starting()
        finally:
            folder.close()

    def why_none(self) -> str:
        """Return why the last run left no server."""
        path = Path(default_server_folder(), "why")
        return path.read_text() if path.exists() else ""


@pytest.fixture
def warm(fake_torch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Warm]:
    """Give runs a fake torch that counts its imports, and a library that does."""
    (installed := tmp_path / "site-packages").mkdir()
    (installed / "torch").symlink_to(FAKES / "torch")
    (installed / "library.py").write_text(LIBRARY)
    (session := tmp_path / "session").mkdir(mode=0o700)
    monkeypatch.setenv("PYTHONPATH", str(installed))
    monkeypatch.setenv("LIBRARY_IMPORTS", str(tmp_path / "library"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    yield Warm(tmp_path, fake_torch)
    stopped = run_meshrun("--warm-stop")
    assert stopped.returncode == 0, stopped.stderr


def text_of(path: Path) -> list[str]:
    """Return the lines of a file, none if it does not exist."""
    return path.read_text().split() if path.exists() else []


def program(folder: Path, source: str) -> Path:
    """Write a program."""
    (path := folder / "program.py").write_text(source)
    return path


def test_the_second_run_imports_nothing(warm: Warm, tmp_path: Path) -> None:
    """It ends like the first one, without a message; several may run at the same time."""
    script = program(tmp_path, "import torch\nprint('up')\n")
    words = ("--nproc-per-node", "2", script)
    server = warm.leave(*words)

    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda _: warm.run(*words), range(3)))

    for done in runs:
        assert done.returncode == 0
        assert done.stdout.count("up") == 2
        assert "warm" not in done.stderr
    assert text_of(warm.imports) == []
    assert [found.server.pid for found in warm.servers()] == [server]
    listed = run_meshrun("--warm-status").stdout.splitlines()
    assert listed[0].split() == ["PID", "AGE", "IDLE", "ENDS", "AFTER", "MEMORY", "PACKAGES"]
    assert listed[1].split()[0] == str(server)

    psutil.Process(server).suspend()
    wait_until(lambda: psutil.Process(server).status() == psutil.STATUS_STOPPED, lambda: "a stop")
    assert f"the warm server (process {server}) is stopped" in warm.run(*words).stderr
    psutil.Process(server).resume()


def test_a_rank_has_the_same_surroundings_as_after_a_fresh_start(
    warm: Warm, tmp_path: Path
) -> None:
    """Everything that a process inherits comes from the caller, not from the server."""
    script = PROGRAMS / "surroundings.py"
    warm.leave("--nproc-per-node", "1", "--prefix", "none", script, "a")
    (folder := tmp_path / "elsewhere").mkdir()
    around = (
        "cd $1; shift; umask 027; ulimit -S -n 900; ulimit -S -c 0; trap '' USR1; "
        "cd /proc/self; echo 7 > oom_score_adj; echo 0x7f > coredump_filter; "
        'echo 60000 > timerslack_ns; cd "$OLDPWD"; exec taskset -c 0 "$@"'
    )

    def surroundings(*options: str) -> dict[str, object]:
        words = command(*options, "--nproc-per-node", "1", "--prefix", "none", script, "b", "c")
        done = subprocess.run(
            ["sh", "-c", around, "sh", str(folder), *words],
            env={**os.environ, "TZ": "Asia/Kathmandu", "OF_THE_CALLER": "1"},
            input="what it reads",
            capture_output=True,
            text=True,
            check=True,
            timeout=90,
        )
        assert "fresh" not in done.stderr, done.stderr
        found: dict[str, object] = json.loads(done.stdout)
        return found

    fresh = surroundings()
    warm.imports.unlink()
    other = {name: (value, fresh[name]) for name, value in surroundings("--warm").items()}
    assert [name for name, (ours, theirs) in other.items() if ours != theirs] == [], other
    assert text_of(warm.imports) == []


USES_LIBRARY = "import torch, library\nprint('at', library.WHERE, flush=True)\n"


def test_what_a_program_imported_is_preloaded_next_time(warm: Warm, tmp_path: Path) -> None:
    """Only installed packages; the program's own files are not kept."""
    (tmp_path / "own.py").write_text("import library\n")
    script = program(tmp_path, f"import own\n{USES_LIBRARY}")
    imported = tmp_path / "library"
    warm.leave(script)
    imported.unlink()

    assert "at home" in warm.run(script).stdout
    assert text_of(imported) == []

    (tmp_path / "own.py").write_text("import library\n\nNEW = 1  # imports the same\n")
    script.write_text(f"import own\n{USES_LIBRARY}print(own.NEW)\n")
    done = warm.run(script)
    assert (done.stdout.split()[-1], done.stderr) == ("1", "")
    assert text_of(imported) == []


@pytest.mark.nightly
def test_another_environment_has_its_own_server(warm: Warm, tmp_path: Path) -> None:
    """Variables that an import has read matter, and others do not."""
    script = program(tmp_path, USES_LIBRARY)
    server = warm.leave(script)
    assert "fresh" not in warm.run(script, env={"LEARNING_RATE": "0.1"}).stderr
    for number, name in enumerate(("LIBRARY_HOME", "PYTHONHASHSEED", "TORCH_LOGS", "LC_ALL")):
        assert server in [found.server.pid for found in warm.servers()]
        done = warm.run(script, env={name: str(number)})
        assert f"starting fresh, not from the warm server: {name} has changed" in done.stderr
        assert f"at {'0' if name == 'LIBRARY_HOME' else 'home'}" in done.stdout
        wait_until(lambda: not warm.starting(), lambda: "the new server")
    assert len(warm.servers()) == 4
    assert server not in [found.server.pid for found in warm.servers()]


_NO_HUGE_PAGES = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.nightly
def test_another_priority_has_its_own_server(warm: Warm, tmp_path: Path) -> None:
    """So does anything else that a running process cannot change; the old server stays."""
    script = program(tmp_path, "import os, torch; print('nice', os.nice(0))")
    server = warm.leave(script)
    done = warm.run(script, around=["nice", "-n", "5"])
    assert "starting fresh, not from the warm server: it has a different nice value" in done.stderr
    assert f"nice {os.nice(0) + 5}" in done.stdout
    wait_until(lambda: len(warm.servers()) == 2, lambda: "the new server")
    assert "fresh" not in warm.run(script, around=["nice", "-n", "5"]).stderr
    assert "fresh" not in warm.run(script).stderr
    assert server in [found.server.pid for found in warm.servers()]
    for around, name in (
        (["ionice", "-c", "3"], "I/O priority"),
        ([sys.executable, "-c", _NO_HUGE_PAGES], "THP_enabled"),
    ):
        done = warm.run(script, around=around)
        assert f"fresh, not from the warm server: it has a different {name}\n" in done.stderr


def test_a_changed_library_ends_the_server(warm: Warm, tmp_path: Path) -> None:
    """So does a new one, as it may shadow another."""
    script = program(tmp_path, USES_LIBRARY)
    server = warm.leave(script)
    library = tmp_path / "site-packages" / "library.py"
    library.write_text(LIBRARY.replace('"home"', '"another place"'))

    done = warm.run(script)
    assert f"starting fresh, not from the warm server: `{library}` has changed" in done.stderr
    assert "at another place" in done.stdout
    wait_until(lambda: not psutil.pid_exists(server), lambda: "the end of the old server")
    wait_until(lambda: len(warm.servers()) == 1, lambda: "the new server")
    (tmp_path / "site-packages" / "new.py").touch()
    assert "site-packages` has changed" in warm.run(script).stderr


def test_a_program_that_imports_less_starts_fresh(warm: Warm, tmp_path: Path) -> None:
    """An import may change other libraries, so a server with more imports is not the same."""
    script = program(tmp_path, USES_LIBRARY)
    warm.leave(script)
    script.write_text("import sys, torch\nprint('library' in sys.modules)\n")
    done = warm.run(script)
    assert f"the imports or variables in `{script}` have changed" in done.stderr
    assert "False" in done.stdout


LATE = "import os, torch\nos.environ['LIBRARY_HOME'] = 'set late'\nimport library\n"
STARTS_A_THREAD = (
    f"{LIBRARY}import threading\nthreading.Thread(target=threading.Event().wait).start()\n"
)


@pytest.mark.parametrize(
    ("source", "library", "why"),
    [
        (LATE, LIBRARY, "the program sets LIBRARY_HOME, which a library reads"),
        ("import torch, library, os\nos._exit", STARTS_A_THREAD, "`library` started 1 thread"),
        (
            "import torch, library\n",
            f"{LIBRARY}import sys\nsys.path.insert(0, os.environ['TMPDIR'])\nimport owned\n",
            "which is not installed",
        ),
    ],
    ids=["variable", "thread", "own file"],
)
def test_what_a_fork_would_not_reproduce_is_not_kept(
    warm: Warm, tmp_path: Path, source: str, library: str, why: str
) -> None:
    """The server's reason is recorded; the next one keeps at least torch."""
    (tmp_path / "site-packages" / "library.py").write_text(
        library.replace("Thread(", "Thread(daemon=True, ")
    )
    Path(os.environ["TMPDIR"], "owned.py").touch()
    script = program(tmp_path, f"{source}\nprint('at', library.WHERE)\n")
    first = warm.run(script)
    wait_until(lambda: bool(warm.why_none()), lambda: "the reason why no server was left")
    assert why in warm.why_none()

    second = warm.run(script)
    assert second.stdout == first.stdout
    wait_until(lambda: bool(warm.servers()), lambda: second.stderr)
    warm.imports.unlink()
    (tmp_path / "library").unlink()
    assert warm.run(script).stdout == first.stdout
    assert text_of(warm.imports) == []
    assert len(text_of(tmp_path / "library")) == 1


WAITS = """\
import os, sys, time, subprocess, torch
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
print("rank", os.getpid(), flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    "victim",
    [
        *("server", "shim", "zygote", "rank", "launcher", "shim and zygote"),
        *("stopped shim", "stopped shim and zygote, launcher", "folder", "removed folder"),
    ],
)
def test_a_kill_leaves_nothing_behind(warm: Warm, tmp_path: Path, victim: str) -> None:
    """The server's death does not harm a run, nor a run's death the server."""
    script = program(tmp_path, WAITS)
    (go := tmp_path / "go").touch()
    words = ("--warm", "--nproc-per-node", "2", script, go)
    server = warm.leave(*words[1:])
    go.unlink()
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("rank", 2)
        rank = psutil.Process(int(running.stdout.split()[-1]))
        zygote = rank.parent()
        assert zygote is not None
        shim = zygote.parent()
        assert shim is not None
        assert shim.ppid() == server, running.stderr
        found = {
            "server": [psutil.Process(server)],
            "shim": [shim],
            "zygote": [zygote],
            "shim and zygote": [shim, zygote],
            "rank": [rank],
            "launcher": [psutil.Process(running.process.pid)],
        }
        mark = mark_of(rank)
        if victim.startswith("stopped"):
            held = [shim, zygote] if "zygote" in victim else [shim]
            for process in held:
                process.suspend()
            wait_for_states(held, stopped=True)
        for process in found.get(victim.rpartition(", ")[2], []):
            process.kill()
        if victim == "folder":  # the server ends with it
            assert run_meshrun("--warm-stop").stdout == "stopped 1 warm server\n"
        if victim == "removed folder":
            shutil.rmtree(default_server_folder())
            wait_until(lambda: not psutil.pid_exists(server), lambda: "the server's end")
        succeeds = victim in ("server", "shim", "stopped shim", "folder", "removed folder")
        if succeeds:
            go.touch()
        code = running.wait()
    assert code == (0 if succeeds else code if victim == "zygote" else 137)
    wait_until(lambda: not marked(mark), lambda: str(marked(mark)))
    go.touch()
    assert warm.run(*words[1:]).returncode == 0
    assert (server in [each.server.pid for each in warm.servers()]) == (
        victim not in {"server", "folder", "removed folder"}
    )


def test_a_zygote_that_still_imports_ends_with_its_launcher(
    warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not finish importing first, which may take long."""
    shutil.copy(PROGRAMS / "held_import.py", tmp_path)
    monkeypatch.setenv("HELD_IMPORTS", str(tmp_path))
    (go := tmp_path / "go").touch()
    words = ("--preload", "held_import", program(tmp_path, "import torch"))
    server = psutil.Process(warm.leave(*words))
    for path in (go, importing := tmp_path / f"importing.{os.uname().nodename}"):
        path.unlink()
    with start_meshrun("--warm", *words, folder=tmp_path) as running:
        wait_until(importing.exists, lambda: running.stderr)
        assert server.children()
        running.process.kill()
        wait_until(lambda: not server.children(), lambda: str(server.children(recursive=True)))


def mark_of(process: psutil.Process) -> str:
    """Return the mark of the launch that a process belongs to."""
    return process.environ()["MESHRUN_LAUNCH_MARK"]


def marked(mark: str) -> list[int]:
    """Return the process ids of the launch with a mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MESHRUN_LAUNCH_MARK") == mark:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_a_run_from_a_server_restarts_and_is_interrupted(warm: Warm, tmp_path: Path) -> None:
    """The next generation comes from the same zygote; Ctrl-C leaves only the server."""
    script = program(
        tmp_path,
        "import os, sys, time, torch\n"
        "print('rank', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    sys.exit(1)\n"
        "if os.path.exists(sys.argv[1]):\n"
        "    time.sleep(1000)\n",
    )
    words = ("--max-restarts", "1", "--nproc-per-node", "2", script, tmp_path / "stays")
    server = warm.leave(*words)
    (tmp_path / "stays").touch()
    with start_meshrun("--warm", *words, folder=tmp_path) as running:
        running.wait_for("rank 1", 2)
        running.signal(signal.SIGINT)
        assert running.wait() == 130
    assert text_of(warm.imports) == []
    assert [found.server.pid for found in warm.servers()] == [server]
    wait_until(
        lambda: not psutil.Process(server).children(),
        lambda: str(psutil.Process(server).children()),
    )


def test_a_server_ends_when_idle_or_with_its_session(warm: Warm, tmp_path: Path) -> None:
    """The session is that of the last run from it. A run does not wait for one that imports."""
    script = program(tmp_path, "import torch\n")
    warm.run("--warm-idle", "0.2", script)
    wait_until(lambda: len(text_of(warm.imports)) == 2, lambda: "a server that imports torch")
    wait_until(lambda: not warm.starting() and not warm.servers(), lambda: "the end of an idle one")
    assert warm.why_none() == ""

    with subprocess.Popen(["sleep", "90"]) as importing:
        ServerFolder(default_server_folder()).record_start(importing.pid)
        of_shell = subprocess.run(
            ["setsid", "sh", "-c", '"$@"; echo $$', "sh", *command("--warm", script)],
            capture_output=True,
            text=True,
            check=True,
            timeout=90,
        )
        importing.kill()
    assert "starting fresh: the warm server is still importing" in of_shell.stderr
    assert "leaving a warm server" in of_shell.stderr
    wait_until(lambda: not warm.starting(), lambda: "the server of a session that has ended")
    wait_until(lambda: warm.servers() == [], lambda: f"the end of {len(warm.servers())} servers")


def test_a_full_disk_is_why_no_server_is_left(warm: Warm, tmp_path: Path) -> None:
    """Whether it is noticed as a server starts, or once it has imported and describes itself."""
    script = program(tmp_path, "import torch\n")
    folder = default_server_folder()
    words = shlex.join(command("--warm", script))
    noticed_later = f"{words}; until [ -e {folder}/why ]; do sleep 0.05; done; {words}"
    for size, run in (("16k", noticed_later), ("4k", words)):
        prepare = f"mount -t tmpfs -o mode=700,size={size} none {os.environ['XDG_RUNTIME_DIR']}"
        around = within("--user", "--map-root-user", "--mount", prepare=prepare)
        done = subprocess.run(
            [*around, "sh", "-c", run], capture_output=True, text=True, timeout=90, check=False
        )
        assert done.returncode == 0, done.stderr
        assert folder in done.stderr
        assert "No space left on device" in done.stderr
        assert "no warm server" in done.stderr


def test_a_file_in_place_of_torch_is_reported_as_without_a_server(
    warm: Warm, tmp_path: Path
) -> None:
    """The folder of the program comes before the installed packages."""
    script = program(tmp_path, "import torch\n")
    warm.leave(script)
    (tmp_path / "torch.py").touch()
    done = warm.run(script)

    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: {tmp_path}/torch.py is imported in place of torch")


_WITHOUT_TORCH = """\
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *words: None if name == "torch" else find(name, *words)
"""


def test_without_torch_no_server_is_left(warm: Warm, tmp_path: Path) -> None:
    (tmp_path / "site-packages" / "sitecustomize.py").write_text(_WITHOUT_TORCH)
    done = warm.run(program(tmp_path, "import torch\n"))

    assert done.returncode == 2
    assert done.stderr.startswith("error: torch is not installed"), done.stderr
    assert "warm" not in done.stderr


def test_no_server_is_used_from_a_folder_that_is_not_private(warm: Warm, tmp_path: Path) -> None:
    """The run starts without one, and says why."""
    (session := tmp_path / "shared").mkdir()
    script = program(tmp_path, "import torch\n")
    (folder := session / "meshrun").mkdir(mode=0o755)
    reasons = {0o755: "its mode is 755, not 700", 0o700: "it belongs to another user"}
    for mode, why in reasons.items():
        folder.chmod(mode)
        if mode == 0o700:
            if os.geteuid() != 0:
                pytest.skip("only root can give a folder to another user")
            os.chown(folder, 65534, 65534)
        done = warm.run(script, env={"XDG_RUNTIME_DIR": str(session)})
        assert done.returncode == 0
        assert f"`{folder}` is not private: {why}" in done.stderr
        assert os.listdir(folder) == []


@pytest.mark.parametrize("who", ["another user", "fewer privileges"])
def test_others_are_neither_served_nor_trusted(
    who: str, warm: Warm, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Both ends check the other's user and whether it is sandboxed, even if it sees the folder."""
    as_other, first = [], ""
    if who == "another user":
        as_other, _ = request.getfixturevalue("as_nobody")
    elif read_status("/proc/self/status")["NoNewPrivs"] == "1":
        pytest.skip("no process here can gain privileges")
    else:
        first = LIMITED
    script = program(tmp_path, "import torch\n")
    server = warm.leave(script)
    name = f"{server}.sock"
    words = {"cwd": default_server_folder(), "stdout": subprocess.PIPE, "text": True}
    python = [sys.executable, "-c"]
    own, other = [*python, ASKS, name], [*as_other, *python, first + ASKS, name]
    for asks, answer in ((own, "answered\n"), (other, "refused\n")):
        asked = subprocess.run(asks, check=True, **words)  # type: ignore[call-overload]
        assert asked.stdout == answer
    assert psutil.pid_exists(server)
    assert warm.run(script).stderr == ""

    listens = [*as_other, *python, first + LISTENS, name]
    with subprocess.Popen(listens, **words) as impostor:  # type: ignore[call-overload]
        assert impostor.stdout.readline() == "listening\n"
        done = warm.run(script)
        assert impostor.stdout.readline() == "got nothing\n"
    assert done.returncode == 0
    assert f"the warm server (process {server}) did not answer; starting fresh" in done.stderr


@pytest.mark.parametrize("what", ["module", "broken", "unclear", "command", "exec"])
def test_programs_that_are_not_plain_scripts(
    warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A module starts from a server too; one that cannot, or is broken, runs as without one."""
    monkeypatch.chdir(tmp_path)
    source = "import torch\nprint('up')\n"
    if what == "unclear":
        source = f"import os, sys\nos.environ['TORCH_LOGS'] = sys.stdin.read()\n{source}"
    script = program(tmp_path, "def" if what == "broken" else source)
    words: dict[str, tuple[str | Path, ...]] = {
        "module": ("-m", "program"),
        "command": ("--no-python", "echo", "up"),
        "exec": ("--start-method", "exec", script),
    }
    first, second = (warm.run(*words.get(what, (script,))) for _ in range(2))
    if what in {"module", "broken"}:
        wait_until(lambda: bool(warm.servers()), lambda: second.stderr)
        warm.imports.unlink(missing_ok=True)
        second = warm.run(*words.get(what, (script,)))
        assert text_of(warm.imports) == []
    assert (first.returncode, second.returncode) == ((1, 1) if what == "broken" else (0, 0))
    assert ("SyntaxError" if what == "broken" else "up") in second.stdout + second.stderr
    if what in {"command", "exec"}:
        assert second.stderr.count("--warm has no effect") == 1
        assert warm.servers() == []


@pytest.mark.nightly
def test_fifty_at_once(warm: Warm, tmp_path: Path) -> None:
    """Without a server they leave one, and then all are forked from it."""
    script = program(tmp_path, "import torch\n")
    for _ in range(2):
        with ThreadPoolExecutor(50) as pool:
            runs = list(pool.map(lambda _: warm.run("--nproc-per-node", "2", script), range(50)))
        assert {done.returncode for done in runs} == {0}
        wait_until(lambda: not warm.starting(), lambda: str(warm.starting()))
        assert len(warm.servers()) == 1
        imports = text_of(warm.imports)
        warm.imports.unlink(missing_ok=True)
    assert imports == []
