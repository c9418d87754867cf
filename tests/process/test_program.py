"""A program runs as it does under ``python``."""

import gzip
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest

from tests.kit import FAKES, NEW_INTERPRETERS, PROGRAMS, ROOT, ZYGOTE, lines_of, run_meshrun

METHODS = ["fork", "exec"]


def python(*args: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``python -u``, as torchrun runs a rank."""
    words = [sys.executable, "-u", *map(str, args)]
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=cwd)


@pytest.mark.parametrize(
    "how",
    ["absolute", "relative", "dots", "link", "over a link", "module", "directory", "zip",
     "zip over a link", "compiled"],
)  # fmt: skip
@pytest.mark.parametrize("method", METHODS)
def test_a_program_finds_itself_as_under_python(
    how: str, method: str, tmp_path: Path, fake_torch: Path
) -> None:
    """argv, sys.path[0], __main__ and its attributes, threads, signals, stdout are the same."""
    folder = tmp_path / "with space"
    folder.mkdir()
    shutil.copy(PROGRAMS / "describe.py", folder)
    (folder / "link.py").symlink_to(PROGRAMS / "describe.py")
    (folder / "app").mkdir()
    shutil.copy(PROGRAMS / "describe.py", folder / "app" / "__main__.py")
    shutil.make_archive(str(folder / "app"), "zip", folder / "app")
    # `way/..` is `other`, not `folder`
    (folder / "other" / "deep").mkdir(parents=True)
    (folder / "way").symlink_to("other/deep")
    shutil.copy(PROGRAMS / "describe.py", folder / "other")
    shutil.copy(folder / "app.zip", folder / "other" / "other.zip")
    py_compile.compile(str(PROGRAMS / "describe.py"), str(folder / "other" / "describe.pyc"))
    words = {
        "absolute": [str(folder / "describe.py")],
        "relative": ["describe.py"],
        "dots": ["app/../describe.py"],
        "link": ["link.py"],
        "over a link": ["way/../describe.py"],
        "zip over a link": ["way/../other.zip"],
        "module": ["-m", "describe"],
        "directory": ["app"],
        "zip": ["app.zip"],
        "compiled": ["way/../describe.pyc"],
    }[how] + ["--mesh", "x y", "-h", "--", "--lr=1"]

    expected = python(*words, cwd=folder)
    ours = run_meshrun("--no-prefix", "--start-method", method, *words, cwd=folder)

    assert expected.returncode == ours.returncode == 0, ours.stderr
    assert json.loads(ours.stdout) == json.loads(expected.stdout)


@pytest.mark.parametrize(
    "words",
    [["missing.py"], ["bad_syntax.py"], [PROGRAMS / "bad_import.py"],
     ["-m", "missing_module"], ["empty"], ["other.pyc"]],
    ids=["no file", "syntax", "import", "no module", "no main", "of another Python"],
)  # fmt: skip
def test_the_error_of_a_broken_program_is_python_s_and_printed_once(
    words: list[str | Path], fake_torch: Path, tmp_path: Path
) -> None:
    """The same last line and exit code as ``python``, however many ranks there are."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad_syntax.py").write_text("x = (\n")
    (tmp_path / "other.pyc").write_bytes(bytes(16))
    expected = python(*words, cwd=tmp_path)
    ours = run_meshrun("--nproc-per-node", "4", *words, cwd=tmp_path)

    message = expected.stderr.strip().splitlines()[-1].removeprefix(f"{sys.executable}: ")
    assert ours.returncode == expected.returncode
    assert ours.stderr.count(message) >= 1
    assert ours.stdout == ""
    assert "meshrun/worker" not in ours.stderr
    assert ours.stderr.count("Traceback") <= 1


def test_a_syntax_error_is_printed_as_by_python(fake_torch: Path, tmp_path: Path) -> None:
    """Nothing is added."""
    (tmp_path / "unclosed.py").write_text("x = (1\nprint('never')\n")
    expected = python(tmp_path / "unclosed.py")
    ours = run_meshrun("--nproc-per-node", "2", tmp_path / "unclosed.py")

    assert "SyntaxError: '(' was never closed" in expected.stderr
    assert (ours.returncode, ours.stdout, ours.stderr) == (1, "", expected.stderr)


@pytest.mark.parametrize("words", [["escape.py"], ["-m", "escape"]], ids=["script", "module"])
def test_warnings_are_those_of_python(
    words: list[str], fake_torch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning of the compiler is printed once, and nothing is added."""
    monkeypatch.setenv("PYTHONWARNINGS", "default")  # Python 3.12 always shows this warning
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (tmp_path / "escape.py").write_text("print(len('\\d'))\n")
    expected = python(*words, cwd=tmp_path)
    ours = run_meshrun("--no-prefix", *words, cwd=tmp_path)

    assert "invalid escape sequence" in expected.stderr
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, "2\n", expected.stderr)


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, fake_torch: Path) -> None:
    """With the system's message and python's exit code."""
    program = tmp_path / "secret.py"
    program.write_text("print('never')")
    program.chmod(0)
    if os.access(program, os.R_OK):
        pytest.skip("this user may read every file, so none can be made unreadable")
    ours = run_meshrun(program)

    assert ours.returncode == 2
    assert "Permission denied" in ours.stderr


def test_a_preload_that_fails_is_reported_once(fake_torch: Path) -> None:
    """If torch cannot be imported, its traceback ends the launch."""
    ours = run_meshrun(
        "--nproc-per-node", "4", PROGRAMS / "echo.py", env={"FAKE_TORCH_BREAKS": "1"}
    )

    assert ours.returncode == 1
    assert ours.stderr.count("ImportError: libtorch_cpu.so") == 1
    assert ours.stdout == ""


@pytest.mark.nightly
def test_a_preload_that_executes_another_program_ends_the_launch(
    fake_torch: Path, tmp_path: Path
) -> None:
    """That program does not have the launcher's socket, and would run for ever."""
    (tmp_path / "executes.py").write_text("import os\nos.execvp('sleep', ['sleep', '1000'])\n")
    env = {"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{tmp_path}"}
    ours = run_meshrun("--preload", "executes", PROGRAMS / "echo.py", env=env)

    assert ours.returncode == 137
    assert f"error: {ZYGOTE} was killed by SIGKILL" in ours.stderr


@pytest.mark.parametrize("place", ["beside", "elsewhere"])
def test_a_preload_may_add_to_the_path(fake_torch: Path, tmp_path: Path, place: str) -> None:
    """The program finds what it added, whether the module is in the program's folder or not."""
    (folder := tmp_path / place).mkdir()
    (folder / "adds.py").write_text("import sys\nsys.path.append('/added')\n")
    (program := tmp_path / "beside" / "program.py").parent.mkdir(exist_ok=True)
    program.write_text("import sys\nprint(sys.path.count('/added'))\n")
    env = {"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{tmp_path / 'elsewhere'}"}
    ours = run_meshrun("--preload", "adds", "--no-prefix", program, env=env)

    assert (ours.returncode, ours.stdout) == (0, "1\n"), ours.stderr


def test_several_modules_in_one_preload_are_an_error(fake_torch: Path) -> None:
    """The hint shows how to repeat the option."""
    ours = run_meshrun("--preload", "json,math", PROGRAMS / "echo.py")

    assert ours.returncode == 2
    assert ours.stderr.startswith("error: --preload json,math: expected one module\n")
    assert "hint: use --preload json --preload math" in ours.stderr


_MISSING = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_MISSING, f"torch is not installed for {sys.executable}"),
        ("", "{file} is imported in place of torch"),
        ("__version__ = '1.9.0'", "meshrun requires torch 2.10 or newer, found 1.9.0, {file}"),
    ],
)
def test_a_python_without_a_usable_torch(tmp_path: Path, text: str, message: str) -> None:
    """The error names the interpreter or the file found, as there may be others."""
    file = tmp_path / "torch.py"
    file.write_text(text)
    ours = run_meshrun(PROGRAMS / "echo.py", env={"PYTHONPATH": str(tmp_path)})

    assert (ours.returncode, ours.stdout) == (2, "")
    assert ours.stderr.splitlines()[0] == "error: " + message.format(file=file)


def test_a_file_with_the_name_of_a_standard_module(tmp_path: Path) -> None:
    """It is named; the failed import is no bug of meshrun's."""
    (file := tmp_path / "random.py").touch()
    ours = run_meshrun("--dry-run", PROGRAMS / "echo.py", env={"PYTHONPATH": str(tmp_path)})

    assert ours.returncode == 2
    assert ours.stderr.splitlines()[0] == f"error: {file} is imported in place of Python's `random`"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (_MISSING, "No module named 'torch'"),
        ("__version__ = '1.9.0'", "meshrun requires torch 2.10 or newer, found 1.9.0"),
    ],
)
def test_ranks_that_import_torch_themselves_need_a_store(
    text: str, why: str, tmp_path: Path
) -> None:
    """Why there is none is one line, without a traceback."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(text)
    (tmp_path / "torch" / "distributed.py").touch()
    words = ("--no-python", "--", "sleep", "1000")
    ours = run_meshrun(*words, env={"PYTHONPATH": str(tmp_path)})

    assert (ours.returncode, ours.stdout, "Traceback" in ours.stderr) == (71, "", False)
    assert f"meshrun: cannot serve the ranks' store: {why}" in ours.stderr


@pytest.mark.parametrize("version", ["2.6.0+cu124", "2.7.1"])
def test_a_torch_that_has_all_modules_but_is_too_old(fake_torch: Path, version: str) -> None:
    """The error gives the version that is required, not what this one lacks."""
    ours = run_meshrun(PROGRAMS / "echo.py", env={"FAKE_TORCH_VERSION": version})

    assert (ours.returncode, ours.stdout) == (2, "")
    file = FAKES / "torch" / "__init__.py"
    message = f"error: meshrun requires torch 2.10 or newer, found {version}, {file}"
    assert ours.stderr.splitlines() == [message]


def test_a_torch_that_is_older_than_promised_but_lacks_nothing_is_used(fake_torch: Path) -> None:
    ours = run_meshrun(PROGRAMS / "echo.py", env={"FAKE_TORCH_VERSION": "2.8.0"})

    assert ours.returncode == 0


def test_a_preload_that_needs_another_torch_is_reported_with_its_traceback(
    fake_torch: Path, tmp_path: Path
) -> None:
    """The error does not claim that the installed torch is too old."""
    (tmp_path / "old_library.py").write_text("import torch._six\n")
    path = os.pathsep.join([str(FAKES), str(tmp_path)])
    words = ("--preload", "old_library", PROGRAMS / "echo.py")
    ours = run_meshrun(*words, env={"PYTHONPATH": path})

    assert ours.returncode == 1
    assert 'old_library.py", line 1, in <module>' in ours.stderr
    assert ours.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'torch._six'"


def test_torch_is_imported_once_per_node(fake_torch: Path) -> None:
    ours = run_meshrun("--nproc-per-node", "8", PROGRAMS / "echo.py")

    assert ours.returncode == 0
    assert len(fake_torch.read_text().splitlines()) == 1


def test_exec_gives_each_rank_its_own_interpreter(fake_torch: Path, tmp_path: Path) -> None:
    """With the rank's environment; the zygote imports nothing that ranks would not share."""
    program = tmp_path / "says.py"
    program.write_text("print(open('/proc/self/environ').read().replace('\\0', '\\n'))")
    ours = run_meshrun("--start-method", "exec", "--nproc-per-node", "4", program)

    assert ours.returncode == 0
    assert sorted(re.findall(r"\bRANK=(\d)", ours.stdout)) == ["0", "1", "2", "3"]
    assert len(fake_torch.read_text().splitlines()) <= 1  # by the store


def test_a_zygote_with_a_thread_does_not_fork(fake_torch: Path) -> None:
    """Each rank gets its own interpreter, and one line says why."""
    ours = run_meshrun(
        "--nproc-per-node", "3", PROGRAMS / "echo.py", env={"FAKE_TORCH_THREAD": "1"}
    )

    assert ours.returncode == 0, ours.stderr
    assert f"meshrun: {NEW_INTERPRETERS}: importing `torch` started 1 thread\n" in ours.stderr
    assert sorted(ours.stdout.splitlines()) == [f"[rank {rank}] out {rank}" for rank in range(3)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("ranks", "code"), [(1, 5), (2, 0)])
def test_a_rank_ends_as_a_program_does_under_python(
    ranks: int, code: int, method: str, tmp_path: Path, fake_torch: Path
) -> None:
    """Threads joined, atexit handlers run, objects freed, files flushed, the exit code kept."""
    program = PROGRAMS / "at_exit.py"
    alone = python(program, tmp_path, str(code))
    words = ("--start-method", method, "--nproc-per-node", str(ranks))
    # As torch does; it makes __mp_main__ a second name of __main__.
    as_torch = ("--preload", "multiprocessing")
    ours = run_meshrun(*words, *as_torch, program, tmp_path, str(code))

    def traces(rank: str) -> dict[str, str]:
        return {path.name: path.read_text() for path in (tmp_path / rank).iterdir()}

    assert ours.returncode == alone.returncode == code
    assert traces("alone").keys() == {"atexit", "unflushed", "cycle", "thread", "handler"}
    for rank in range(ranks):
        assert traces(str(rank)) == traces("alone")
    assert alone.stdout == "no newline at the endfreed\n"
    assert sorted(ours.stdout.splitlines()) == [
        f"[rank {rank}] no newline at the endfreed" for rank in range(ranks)
    ]


@pytest.mark.parametrize("preloaded", [[], ["--preload", "trainer.files"]])
def test_an_installed_program_frees_what_its_modules_hold(
    preloaded: list[str], tmp_path: Path, fake_torch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python does at the end; otherwise a compressed file, for one, lacks its last bytes."""
    package = tmp_path / "site-packages" / "trainer"
    package.mkdir(parents=True)
    (package / "files.py").write_text("opened = []")
    (package / "__main__.py").write_text(
        "import gzip\n"
        "from trainer import files\n"
        "files.opened.append(gzip.open('log.gz', 'wt'))\n"
        "files.opened[0].write('saved')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}:{os.environ['PYTHONPATH']}")

    ours = run_meshrun(*preloaded, "-m", "trainer", cwd=tmp_path)

    assert ours.returncode == 0, ours.stderr
    with gzip.open(tmp_path / "log.gz", "rt") as file:
        assert file.read() == "saved"


@pytest.mark.parametrize("method", METHODS)
def test_classes_of_main_pickle_and_have_source(method: str, fake_torch: Path) -> None:
    """__main__ is the program's module, not meshrun's."""
    ours = run_meshrun("--start-method", method, PROGRAMS / "pickling.py")

    assert ours.stdout == "[rank 0] 1 class Point:\n", ours.stderr


@pytest.mark.parametrize("words", [(PROGRAMS / "from_a_child.py",), ("-m", "from_a_child")])
@pytest.mark.parametrize("method", METHODS)
def test_spawned_children_send_back_what_main_defines(
    method: str, words: tuple[str | Path, ...], fake_torch: Path
) -> None:
    """They know the program as __mp_main__, even if multiprocessing was imported before it."""
    options = ("--start-method", method, "--preload", "multiprocessing")
    ours = run_meshrun(*options, *words, env={"PYTHONPATH": f"{FAKES}{os.pathsep}{PROGRAMS}"})

    assert ours.stdout == "[rank 0] 1\n", ours.stderr


def test_ranks_do_not_share_the_state_of_imports(fake_torch: Path, tmp_path: Path) -> None:
    """Neither random state nor the folder for temporary files is as imports left it."""
    (tmp_path / "asks.py").write_text("import tempfile; tempfile.gettempdir()")  # as dill does
    ours = run_meshrun(
        "--nproc-per-node", "4", "--no-prefix", "--preload", "numpy", "--preload", "asks",
        PROGRAMS / "seeds.py", tmp_path / "new",
        env={"PYTHONPATH": f"{FAKES}{os.pathsep}{tmp_path}"},
    )  # fmt: skip
    found = ours.stdout.split()

    assert len(found) == 12, ours.stderr
    assert len(set(found)) == 9
    assert found.count(str(tmp_path / "new")) == 4

    chosen = tmp_path / "chosen"
    (tmp_path / "asks.py").write_text(f"import tempfile; tempfile.tempdir = {str(chosen)!r}")
    ours = run_meshrun(
        "--preload", "asks", PROGRAMS / "seeds.py", tmp_path / "new",
        env={"PYTHONPATH": f"{FAKES}{os.pathsep}{tmp_path}"},
    )  # fmt: skip

    assert ours.stdout.split()[-1] == str(chosen), ours.stderr


def test_stdin_and_folder_are_the_launchers(fake_torch: Path, tmp_path: Path) -> None:
    """A rank reads piped input, in the folder where meshrun was started."""
    program = tmp_path / "read.py"
    program.write_text("import os, sys; print(sys.stdin.readline().strip(), os.getcwd())")
    ours = run_meshrun(program, input="piped\n", cwd=tmp_path)

    assert ours.stdout == f"[rank 0] piped {tmp_path}\n", ours.stderr


def test_a_program_from_a_pipe_is_read_once(fake_torch: Path, tmp_path: Path) -> None:
    """All ranks run it; a descriptor that they do not inherit is refused."""
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["sh", "-c", f"echo 'print(__file__)' > {tmp_path}/pipe"]):
        ours = run_meshrun("--nproc-per-node", "2", "--no-prefix", tmp_path / "pipe")
    assert ours.stdout == f"{tmp_path}/pipe\n" * 2, ours.stderr

    dash = run_meshrun("-", input="print(1)")
    assert dash.returncode == 2
    assert "hint: pass /dev/stdin for a program on standard input" in dash.stderr

    shell = run_meshrun("/dev/fd/9", around=["sh", "-c", 'exec 9</dev/null; exec "$@"', "sh"])
    assert shell.returncode == 2
    assert "error: cannot run `/dev/fd/9`: ranks do not inherit this descriptor" in shell.stderr


def test_a_package_runs_as_a_module(fake_torch: Path) -> None:
    """-m accepts a package with a __main__."""
    ours = run_meshrun("-m", "package", "--flag", cwd=PROGRAMS)

    assert lines_of(ours.stdout, ["rank 0"]) == {"rank 0": ["package ['--flag'] package"]}


@pytest.mark.torch
@pytest.mark.parametrize("method", METHODS)
def test_files_beside_the_program_do_not_shadow_torchs_imports(method: str, tmp_path: Path) -> None:
    """The program gets its own ``platform.py`` and ``json.py``, and torch the standard ones."""
    for name in ("platform", "json", "profile", "queue"):
        (tmp_path / f"{name}.py").write_text(f"MINE = {name!r}\n")
    program = tmp_path / "program.py"
    # With exec, a program that imports torch breaks on platform.py, as it does under python.
    then = "; import torch" if method == "fork" else ""
    program.write_text(
        "import platform, json, profile, queue\n"
        f"print(platform.MINE, json.MINE, profile.MINE, queue.MINE){then}\n"
    )
    ours = run_meshrun("--start-method", method, program)

    assert (ours.stdout, ours.stderr) == ("[rank 0] platform json profile queue\n", "")


def test_one_node_does_not_import_what_several_need(
    fake_torch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before the ranks have started, at least."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    several = ("--nnodes", "2", "--rdzv-conf", "join_timeout=1")
    alone, one_of_two = (
        run_meshrun(*words, "--nproc-per-node", "1", PROGRAMS / "echo.py").stderr
        for words in ((), several)
    )

    assert "meshrun.supervisor.loop" in alone
    assert "meshrun.rendezvous.peers" not in alone
    assert "meshrun.rendezvous.peers" in one_of_two


WRITES = """
import os, stat
for name in os.listdir("/proc/self/fd") if os.environ["RANK"] == "1" else ():
    if int(name) > 2 and os.path.exists(f"/proc/self/fd/{name}"):
        if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
            for said in (
                b"{", b"[" * 60_000, b'["Exit", {"grace_s": 1.0}]',
                b'["RankReady", {"rank": 77, "at_ns": 1}]',
                b'["RankExited", {"rank": 0, "pid": 1, "wait_status": 9, "at_ns": 1}]',
            ):
                os.write(int(name), said)
            print("wrote", flush=True)
print("done")
"""


def test_writing_to_meshruns_descriptors_harms_no_other_rank(
    fake_torch: object, tmp_path: Path
) -> None:
    """A rank cannot stop or impersonate another one, and one warning is printed."""
    (program := tmp_path / "program.py").write_text(WRITES)
    ours = run_meshrun("--nproc-per-node", "2", "--no-prefix", program)

    assert ours.returncode == 0, ours.stderr
    assert sorted(set(ours.stdout.split())) == ["done", "wrote"]
    assert ours.stdout.count("done") == 2
    assert ours.stderr.count("ignoring what a rank's program wrote") == 1


@pytest.mark.parametrize("method", METHODS)
def test_ranks_use_the_meshrun_that_was_started(
    method: str, fake_torch: Path, tmp_path: Path
) -> None:
    """With `python -m meshrun` in a clone, that is the clone, even if a version is installed."""
    (tmp_path / "meshrun").mkdir()
    (tmp_path / "meshrun" / "__init__.py").write_text("raise RuntimeError('installed')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, "-m", "meshrun", "--start-method", method, PROGRAMS / "echo.py"]
    ours = subprocess.run(
        words,
        cwd=PROGRAMS.parent.parent,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ours.returncode, ours.stdout) == (0, "[rank 0] out 0\n"), ours.stderr


def test_an_archive_of_meshrun_says_why_it_cannot_launch(fake_torch: Path, tmp_path: Path) -> None:
    """Its processes are started by the path of a file; a dry run starts none."""
    shutil.copytree(ROOT / "meshrun", tmp_path / "app" / "meshrun")
    zipapp.create_archive(
        tmp_path / "app", archive := tmp_path / "a.pyz", main="meshrun.__main__:main"
    )
    launched, planned = python(archive, PROGRAMS / "echo.py"), python(archive, "--dry-run", "a.py")

    assert (launched.returncode, launched.stdout) == (71, "")
    assert f"no file `{archive}/meshrun/start.py`" in launched.stderr
    assert planned.returncode == 0, planned.stderr
