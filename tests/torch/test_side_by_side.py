"""The same command line under torchrun and meshrun: workers see the same."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit import PROGRAMS, run_meshrun
from tests.variations import ordinary

pytestmark = pytest.mark.torch
SEEN = PROGRAMS / "seen.py"
TWO = ("--nproc-per-node", "2")
_HANG_S = 100.0
_VARYING = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE",
            "OMP_NUM_THREADS", "SEEN_DIR", "_"}  # fmt: skip
"""Variables whose values differ: addresses and names of a launch, and a documented default."""
_OF_FUNCTIONS = {"argv", "cwd", "executable", "stdin", "umask", "limits", "nice", "cores"}
"""What is compared if torchrun runs the program as a function by multiprocessing."""
_OURS = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MESHRUN_GENERATION", "MESHRUN_LAUNCH_MARK",
         "MESHRUN_NPROC_PER_NODE", "MESHRUN_RUN_ID", "MESHRUN_WORKER_PID"}  # fmt: skip
"""Documented variables that torchrun's workers do not have."""


@dataclass(frozen=True)
class Case:
    """A command line; PORT, FOLDER and WRAPPER are filled in for each launcher."""

    name: str
    words: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    ours: tuple[str, ...] = ()
    """Options for meshrun only, which torchrun does not have."""
    umask: int = -1
    python: bool = True
    """Whether torchrun's workers are new interpreters rather than functions."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Launch:
    """The result of one launcher's run, and what its workers saw."""

    code: int
    stdout: str
    stderr: str
    seen: dict[str, dict[str, object]]
    port: str
    logs: Path

    def log_files(self) -> dict[str, str]:
        """Return the text of each file below the run's folder; folders end with a slash."""
        (run,) = self.logs.iterdir()
        return {
            str(path.relative_to(run)) + "/" * path.is_dir(): path.read_text()
            if path.is_file()
            else ""
            for path in run.rglob("*")
        }

    def environment(self, rank: str) -> dict[str, str]:
        """Return the variables of a rank."""
        return self.seen[rank]["environment"]  # type: ignore[return-value]


def case(name: str, *words: str | Path, **more: object) -> Case:
    return Case(name, tuple(map(str, words)), **more)  # type: ignore[arg-type]


CASES = (
    case("together", *TWO, "--nnodes=1:1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
         "--rdzv-id=job7", "--role", "trainer", "--max-restarts", "2", "--virtual-local-rank",
         "--signals-to-handle", "SIGTERM,SIGUSR1", "-t", "0:1,1:2", "--log-dir", "FOLDER",
         SEEN, "--gpu=${local_rank}", "$$x", "$local_rank", "${other}", "$", "$$$1",
         env=(("CUDA_VISIBLE_DEVICES", "4,5"), ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"),
              ("PYTHONPATH", "inside:/nowhere"))),
    case("static", *TWO, "--master_addr=127.0.0.1", "--master_port=PORT", "--node_rank=0",
         "--duplicate-stdout-filters", "apple,orange", "--duplicate-stderr-filters", "pear",
         "-t", "3", "--log-dir", "FOLDER",
         "seen.py", "a", "b", "--help", "", "--", "-x", "snow \u2603"),
    case("variables", "--no-python", sys.executable, "link.py", "${local_rank}", umask=0o027,
         env=(("PET_NPROC_PER_NODE", "2"), ("PET_STANDALONE", "1"), ("PYTHONHASHSEED", "7"),
              ("PYTHONWARNINGS", "ignore::UserWarning"), ("OMP_NUM_THREADS", "3"),
              ("PYTHONDONTWRITEBYTECODE", "1"))),
)  # fmt: skip
"""Independent options share a command line; the first is in the ordinary set."""
MORE = (
    case("module", *TWO, "--standalone", "-r", "0:3", "-t", "2", "--log-dir", "FOLDER",
         "-m", "seen", "a", "--b"),
    case("plain", *TWO, "seen.py", "a", "b", "--help", "", "--", "-x", "snow \u2603"),
    case("command", *TWO, "--no-python", sys.executable, "seen.py", "${local_rank}"),
    case("static-alone", *TWO, "--master_addr=127.0.0.1", "--master_port=PORT", "--node_rank=0",
         SEEN),
    case("filters", *TWO, "--duplicate-stdout-filters", "apple,orange", "-t", "3",
         "--duplicate-stderr-filters", "pear", "--log-dir", "FOLDER", SEEN),
    case("standalone", "--nproc_per_node=2", "--standalone", "--rdzv-id=job", SEEN,
         env=(("SEEN_ASK", "torch"),)),
    case("rendezvous", *TWO, "--nnodes=1:1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
         "--rdzv-id=job7", "-r", "1", "--log-dir", "FOLDER", SEEN),
    case("module-alone", *TWO, "-m", "seen", "--", "a", "--", "--b"),
    case("package", *TWO, "-m", "inside.package", "a"),
    case("run-path", *TWO, "--run-path", SEEN, "a", "--b", python=False),
    case("restarts", *TWO, "--role", "trainer", "--max-restarts", "2", SEEN),
    case("redirects", *TWO, "-r=3", "--log-dir", "FOLDER", SEEN),
    case("tee", *TWO, "-t", "0:1,1:2", "--log-dir", "FOLDER", SEEN),
    case("both", *TWO, "-r", "0:3", "-t", "2", "--log-dir", "FOLDER", SEEN),
    case("abbreviated", *TWO, "--redirect=3", "--log-dir=FOLDER", SEEN),
    case("macro", *TWO, SEEN, "--gpu=${local_rank}", "$$x", "$local_rank", "${other}", "$", "$$$1"),
    case("virtual", *TWO, "--virtual-local-rank", SEEN, env=(("CUDA_VISIBLE_DEVICES", "4,5"),)),
    case("port", *TWO, "--master-port", "PORT", SEEN),
    case("variables-alone", SEEN, env=(("PET_NPROC_PER_NODE", "2"), ("PET_STANDALONE", "1"))),
    case("pet-module", "seen", "a", env=(("PET_MODULE", "1"), ("PET_NNODES", "1:1"))),
    case("interpreter", *TWO, SEEN, "a", env=(("PYTHON_EXEC", "WRAPPER"),)),
    case("ranks-filter", *TWO, "--local-ranks-filter", "0", "-t", "3", "--log-dir=FOLDER", SEEN),
    case("dev-null", *TWO, "--log-dir", "/dev/null", "-t", "3", SEEN),
    case("stdin", SEEN, env=(("SEEN_ASK", "stdin"),)),
    case("mask", *TWO, "link.py", umask=0o027, env=(("PYTHONHASHSEED", "7"),
         ("PYTHONWARNINGS", "ignore::UserWarning"), ("OMP_NUM_THREADS", "3"),
         ("PYTHONDONTWRITEBYTECODE", "1"))),
    case("folder", *TWO, "a folder", "a"),
    case("signals", *TWO, "--signals-to-handle", "SIGTERM,SIGUSR1", SEEN,
         env=(("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"), ("PYTHONPATH", "inside:/nowhere"))),
)  # fmt: skip
ENDS = (
    case("exit", *TWO, SEEN, env=(("SEEN_END", "3"),)),
    case("kill", *TWO, SEEN, env=(("SEEN_END", "SIGKILL"),)),
    case("segv", *TWO, SEEN, env=(("SEEN_END", "SIGSEGV"),)),
    case("term", *TWO, "--no-python", sys.executable, SEEN, env=(("SEEN_END", "SIGTERM"),)),
    case("again", *TWO, "--max-restarts=1", "-r", "3", "--log-dir=FOLDER", SEEN,
         env=(("SEEN_END", "3"),)),
)  # fmt: skip


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A working folder, with programs in all the forms that python runs."""
    with tempfile.TemporaryDirectory(prefix="side") as name:
        folder = Path(name).resolve()
        (folder / "inside" / "package").mkdir(parents=True)
        (folder / "a folder").mkdir()
        for copy in ("seen.py", "inside/package/__main__.py", "a folder/__main__.py"):
            shutil.copy(SEEN, folder / copy)
        (folder / "link.py").symlink_to(SEEN)
        (folder / "stdin").write_text("a line of stdin\n")
        wrapper = folder / "wrapper"
        wrapper.write_text(f'#!/bin/sh\nWRAPPED="$*" exec {sys.executable} "$@"\n')
        wrapper.chmod(0o755)
        yield folder


def launch(each: Case, place: Path) -> tuple[Launch, Launch]:
    """Run a case under torchrun and meshrun at the same time."""
    started = [_start(each, launcher, place) for launcher in ("torchrun", "meshrun")]
    theirs, ours = [finish() for finish in started]
    return theirs, ours


def _start(each: Case, launcher: str, place: Path) -> Callable[[], Launch]:
    folder = place / f"{each.name} {launcher}"
    (folder / "seen").mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    filled = {"PORT": port, "FOLDER": str(folder / "logs"), "WRAPPER": str(place / "wrapper")}

    def fill(word: str) -> str:
        return re.sub("|".join(filled), lambda found: filled[found[0]], word)

    ours = launcher == "meshrun"
    module = "meshrun" if ours else "torch.distributed.run"
    more = ("--exit-code", "torchrun", "--prefix", "torchrun", *each.ours) if ours else ()
    with open(place / "stdin") as stdin:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *more, *map(fill, each.words)],
            env={**os.environ, **{name: fill(value) for name, value in each.env},
                 "SEEN_DIR": str(folder / "seen")},
            cwd=place, umask=each.umask, text=True,
            stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def finish() -> Launch:
        with process:
            try:
                stdout, stderr = process.communicate(timeout=_HANG_S)
            finally:
                process.kill()
        seen = {path.stem: json.loads(path.read_text()) for path in folder.glob("seen/*.json")}
        return Launch(process.returncode, stdout, stderr, seen, port, folder / "logs")

    return finish


def bare(text: str) -> list[str]:
    """Return the ranks' lines, sorted, with ``[default0]:`` if they are teed."""
    return sorted(re.findall(r"(?:\[\w+\]:)?\w+ of \d on std\w+$", text, re.MULTILINE))


@pytest.mark.parametrize("case", ordinary([*CASES, *MORE], "together"), ids=str)
def test_a_command_line_means_the_same(case: Case, place: Path) -> None:
    """As many ranks, which see the same, print the same lines and write the same files."""
    theirs, ours = launch(case, place)

    assert (theirs.code, ours.code) == (0, 0), theirs.stderr + ours.stderr
    assert ours.seen.keys() == theirs.seen.keys() != set()
    check_environments(theirs, ours)
    check_processes(case, theirs, ours)
    check_lines(theirs, ours)
    if "FOLDER" in " ".join(case.words):
        check_log_folders(theirs, ours)
    for launched in (theirs, ours):
        if "--rdzv-id=job7" in case.words:
            check_names(launched)
        if any("PORT" in word for word in case.words):
            check_port(launched)


def check_environments(theirs: Launch, ours: Launch) -> None:
    """All variables of torchrun have the same values; additional ones are documented."""
    for rank in theirs.seen:
        wanted, found = theirs.environment(rank), ours.environment(rank)
        assert wanted.keys() - found.keys() == set()
        assert found.keys() - wanted.keys() <= _OURS
        differing = {name for name in wanted if wanted[name] != found[name]}
        assert differing <= _VARYING, {name: (wanted[name], found[name]) for name in differing}


def check_processes(case: Case, theirs: Launch, ours: Launch) -> None:
    """Arguments, folder, streams, session, signals, limits, interpreter and import path.

    The program's folder is first on the path; meshrun's own folder may come last.
    """
    for rank in theirs.seen:
        alone = {"environment", "path", "threads", "faulthandler"}
        names = theirs.seen[rank].keys() - alone if case.python else _OF_FUNCTIONS
        if rank != "0":  # a documented difference: one rank has stdin
            names = names - {"stdin"}
        assert {name: ours.seen[rank][name] for name in names} == {
            name: theirs.seen[rank][name] for name in names
        }
        if case.python:
            wanted, found = theirs.seen[rank]["path"], ours.seen[rank]["path"]
            assert found[: len(wanted)] == wanted  # type: ignore[arg-type, index]
        if case.name == "plain":  # a documented difference: reports show where native code crashed
            assert [each.seen[rank]["faulthandler"] for each in (theirs, ours)] == [False, True]


def check_lines(theirs: Launch, ours: Launch) -> None:
    """Neither prints what goes only to files or is filtered out."""
    assert bare(ours.stdout) == bare(theirs.stdout)
    assert bare(ours.stderr) == bare(theirs.stderr)


def check_log_folders(theirs: Launch, ours: Launch) -> None:
    """The same files with the same lines in the same folders."""
    wanted, found = theirs.log_files(), ours.log_files()
    assert sorted(found) == sorted(wanted)
    assert {name: bare(text) for name, text in found.items()} == {
        name: bare(text) for name, text in wanted.items()
    }


def check_names(launched: Launch) -> None:
    """--rdzv-id names the run and its log folder, which contains the error files."""
    (folder,) = launched.logs.iterdir()
    assert folder.name.startswith("job7_")
    for rank in ("0", "1"):
        environment = launched.environment(rank)
        assert environment["TORCHELASTIC_RUN_ID"] == "job7"
        assert environment["TORCHELASTIC_ERROR_FILE"] == str(
            folder / "attempt_0" / rank / "error.json"
        )


def check_port(launched: Launch) -> None:
    """Programs that create their own store rely on it."""
    for rank in ("0", "1"):
        assert launched.environment(rank)["MASTER_ADDR"] == "127.0.0.1"
        assert launched.environment(rank)["MASTER_PORT"] == launched.port


@pytest.mark.nightly
@pytest.mark.parametrize("case", ENDS, ids=str)
def test_failures_are_alike(case: Case, place: Path) -> None:
    """With --exit-code torchrun, the exit code is torchrun's; the ranks see the same."""
    theirs, ours = launch(case, place)

    assert ours.code == theirs.code == 1
    assert ours.seen.keys() == theirs.seen.keys()
    if "FOLDER" in " ".join(case.words):
        check_log_folders(theirs, ours)


BAD = [
    (("--nproc-per-node", "foo", SEEN), "foo"),
    (("--nproc-per-node", "0", SEEN), "0"),
    (("-r", "4", SEEN), "4"),
    (("-t", "0:7", SEEN), "7"),
    (("--max-restarts", "-1", SEEN), "-1"),
    (("--nnodes", "2:1", SEEN), "2:1"),
    (("--nnodes", "0", SEEN), "0"),
    (("--rdzv-conf", "x", SEEN), "x"),
    (("--rdzv-endpoint", "localhost:x", "--rdzv-backend=c10d", SEEN), "`x`"),
    (("--rdzv-backend", "nosuch", "--rdzv-endpoint=localhost:0", SEEN), "nosuch"),
    (("--forward", "SIGFOO", SEEN), "SIGFOO"),
    (("--signals-to-handle", "SIGKILL", SEEN), "SIGKILL"),
    (("--master-port", "99999", SEEN), "99999"),
    (("--node-rank", "x", SEEN), "x"),
    (("--no-python", "-m", SEEN), "--no-python"),
    (("--numa-binding", "x", SEEN), "x"),
    (("--local-ranks-filter", "a", SEEN), "a"),
    (("--start-method", "thread", SEEN), "thread"),
    (("--shutdown-timeout", "-1", SEEN), "-1"),
    (("--monitor-interval", "soon", SEEN), "soon"),
    (("--event-log-handler", "nosuch", SEEN), "nosuch"),
    (("--logs-specs", "nosuch", SEEN), "nosuch"),
    (("--standalone=yes", SEEN), "--standalone"),
    (("--role",), "--role"),
    (("--n", "2", SEEN), "--n"),
    (("--nosuch", SEEN), "--nosuch"),
    ((), "program"),
    (("--nproc-per-node", "2", "nosuch.py"), "nosuch.py"),
    (("--run-path", "nosuch.py"), "nosuch.py"),
]


@pytest.mark.parametrize(
    ("words", "message"),
    ordinary(BAD, *BAD[::3]),
)
def test_bad_command_lines_are_refused(
    words: tuple[str | Path, ...], message: str, tmp_path: Path
) -> None:
    """Exit code 2, an error that names the mistake, no traceback, and nothing is started."""
    ours = run_meshrun(*words, env={"SEEN_DIR": str(tmp_path)}, cwd=tmp_path)

    assert ours.returncode == 2, ours.stderr
    assert "Traceback" not in ours.stderr
    error, *hint = ours.stderr.strip().split("\n\n")
    assert error.startswith("error: ")
    assert message in error
    assert all(block.startswith("hint: ") for block in hint)
    assert (ours.stdout, list(tmp_path.iterdir())) == ("", [])
