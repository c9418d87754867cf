"""Secrets stay out of arguments, output, plans and reports; only trusted bytes are unpickled."""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path

import psutil
import pytest

from meshrun import __version__
from tests.kit import MARK, PROGRAMS, ROOT, run_meshrun, start_meshrun

SECRET = "hunter2-of-this-test"
_UNSAFE = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "yaml", "jsonpickle"}
_UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "load", "loads"}
_FROM_OURSELVES = {
    "api/remote_call.py": "a function of launch(): through files in a private folder of its caller",
    "actors/node_group.py": "the same, from ranks on nodes of a Ray cluster",
    "worker/function.py": "the same, in the rank",
    "worker/pickling.py": "an exception of such a function or call, from the same source",
    "worker/program.py": "the user's own program, from its file",
    "host/forked_call.py": "what a call returned in a fork of this process, through a pipe to it",
    "worker/answer_requests.py": "what torch has recorded, from torch in the same process",
    "zygote/logs_specs_process.py": "an installed plug-in, by its entry point",
    "rendezvous/torch_handler.py": "torch's rendezvous, from its store: of its own types only",
    "submit/documents.py": "the user's additions to a manifest, by YAML's safe loader",
    "report/elastic_events.py": "an installed plug-in, by its entry point",
    "api/tests_on_ranks.py": "nothing: it asks what can be pickled",
    "worker/call_channel.py": "a socket in a private folder of the caller; each end rejects other"
    " users",
    "worker/serve_calls.py": "a call of the caller, through that channel",
    "worker/serve_tests.py": "nothing: it asks what can be pickled",
    "api/prompt.py": "what the user typed at the prompt",
    "cluster/here.py": "an installed plug-in, by its entry point",
    "ssh/remote_command.py": "an installed plug-in, by its entry point",
    "worker/cells.py": "a cell of the user's own notebook, through the channel of calls",
}
"""Modules that turn bytes into objects or code, and where the bytes come from."""
_UNPICKLE_NOTHING = (
    *("protocol/codec.py", "zygote/server.py", "worker/reporter.py", "supervisor/zygote_client.py"),
    *("supervisor/loop.py", "supervisor/signals.py", "host/network.py"),
    *("rendezvous/connection.py", "rendezvous/frames.py", "rendezvous/handshake.py"),
    *("rendezvous/messages.py", "rendezvous/participant.py", "rendezvous/coordinator.py"),
    *("rendezvous/lobby.py", "rendezvous/torch_backend.py", "rendezvous/torch_withdrawal.py"),
    *("warm/shim.py", "warm/shim.py", "warm/client.py", "warm/warm_server.py"),
    *("warm/server_folder.py", "protocol/packing.py"),
)


@pytest.mark.parametrize(
    "words", [["--start-method", "fork"], ["--start-method", "exec"], ["--no-python"]]
)
def test_no_secret_is_in_an_argv(words: list[str], fake_torch: object, tmp_path: Path) -> None:
    """Any user can read a process's arguments, but only its owner can read the environment."""
    program = [PROGRAMS / "wait.py"]
    if "--no-python" in words:
        program = [sys.executable, "-u", *program]
    env = {"HF_TOKEN": SECRET, "WANDB_API_KEY": SECRET, "PET_RDZV_CONF": f"password={SECRET}"}
    with start_meshrun(
        *("-v", "--nproc-per-node", "2", *words, *program, "children"), env=env, folder=tmp_path
    ) as running:
        running.wait_for("up", 2)
        found = [each for each in psutil.process_iter() if _is_marked(each)]
        argv = [Path(f"/proc/{each.pid}/cmdline").read_bytes() for each in found]
        printed = running.stdout + running.stderr
        running.process.terminate()
        running.wait()

    assert len(found) >= 4 + 2 * 3  # the launcher, the zygote, the store, ranks with children
    assert not any(SECRET.encode() in each for each in argv)
    assert SECRET not in printed


def _is_marked(process: psutil.Process) -> bool:
    try:
        return process.environ().get(MARK) == os.environ[MARK] and process.pid != os.getpid()
    except psutil.Error:
        return False


@pytest.mark.parametrize(
    "words", [["--start-method", "fork"], ["--start-method", "exec"], ["--no-python"]]
)
def test_only_launchers_get_the_secret_of_several_nodes(
    words: list[str], fake_torch: object, tmp_path: Path
) -> None:
    """Ranks and the processes that they start do not need it."""
    program = [str(PROGRAMS / "environment.py")]
    if "--no-python" in words:
        program = [sys.executable, *program]
    path = tmp_path / "secret"
    path.write_text(SECRET)
    env = {"MESHRUN_SECRET": SECRET, "MESHRUN_SECRET_FILE": str(path), "HF_TOKEN": "theirs"}
    ours = run_meshrun("--nproc-per-node", "2", *words, "--no-prefix", *program, env=env)

    assert ours.returncode == 0, ours.stderr
    assert SECRET not in ours.stdout + ours.stderr
    assert ours.stdout.count('"HF_TOKEN": "theirs"') == 2
    assert "MESHRUN_SECRET" not in ours.stdout


def test_the_secret_of_several_nodes_is_in_no_dry_run() -> None:
    """A plan for several nodes does not need it either."""
    env = {"MESHRUN_SECRET": SECRET, "PET_RDZV_ID": f"x-{SECRET}"}
    words = ["--mesh", "dp=2", "--nnodes", "2", "--rdzv-endpoint", "h:1", "--dry-run", "train.py"]
    for form in (["--format", "text"], ["--format", "json"], ["--rank", "1"]):
        ours = run_meshrun(*form, *words, env=env)

        assert ours.returncode == 0, ours.stderr
        assert SECRET not in ours.stdout + ours.stderr


@pytest.mark.parametrize("form", [["--format", "text"], ["--format", "json"], ["--rank", "1"]])
def test_no_secret_is_in_a_dry_run(form: list[str]) -> None:
    """Neither the value of a variable nor that of an option whose name suggests a secret."""
    env = {"HF_TOKEN": SECRET, "PET_RDZV_CONF": "a=b,api_key=abc123"}
    words = ["--mesh", "dp=2", "--role", SECRET, "--dry-run", *form, "train.py", "--token", SECRET]
    ours = run_meshrun(*words, f"x{SECRET}", "--password=7", env=env)

    assert ours.returncode == 0
    assert SECRET not in ours.stdout + ours.stderr
    assert "abc123" not in ours.stdout
    assert "***" in ours.stdout


def test_no_secret_is_in_a_report(fake_torch: object, tmp_path: Path) -> None:
    """Neither printed nor as JSON, after a failure."""
    report = tmp_path / "report.json"
    ours = run_meshrun(
        *("--nproc-per-node", "2", "--report", report, PROGRAMS / "end.py", "SIGSEGV"),
        env={"HF_TOKEN": SECRET},
    )

    assert ours.returncode == 139
    assert SECRET not in ours.stdout + ours.stderr + report.read_text()


def test_only_trusted_bytes_are_unpickled() -> None:
    """No module that reads from peers turns bytes into objects; the few that do are listed."""
    found = {}
    for path in sorted((ROOT / "meshrun").rglob("*.py")):
        if uses := _unsafe_in(ast.parse(path.read_text())):
            found[str(path.relative_to(ROOT / "meshrun"))] = uses

    assert found.keys() == _FROM_OURSELVES.keys()
    assert not found.keys() & set(_UNPICKLE_NOTHING)
    assert all((ROOT / "meshrun" / name).exists() for name in _UNPICKLE_NOTHING)


def _unsafe_in(tree: ast.AST) -> set[str]:
    """Return what a module imports or calls that could execute its input; JSON is safe."""
    uses = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            uses |= {alias.name for alias in node.names} & _UNSAFE
        elif isinstance(node, ast.ImportFrom):
            uses |= {node.module or ""} & _UNSAFE
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in _UNSAFE_CALLS:
                uses.add(function.id)
            if isinstance(function, ast.Attribute) and function.attr in ("load", "loads", "exec"):
                owner = function.value
                uses |= {function.attr} if ast.unparse(owner) != "json" else set()
    return uses


@pytest.mark.parametrize(("mesh", "plan"), [("dp=2", "mesh dp=2: 2 ranks"), ("dp=0", "error: ")])
def test_a_bug_report_has_no_secret(mesh: str, plan: str, tmp_path: Path, fake_torch: Path) -> None:
    """Nor the user's name; it has versions, the scheduler, and the plan or its error."""
    (home := tmp_path / "adalovelace").mkdir()
    (home / "train.py").touch()
    env = {
        "HOME": str(home), "WANDB_API_KEY": "hunter2hunter2", "MESHRUN_SECRET": "hunter3hunter3",
        "SLURM_JOB_USER": "adalovelace", "SLURM_JOB_ACCOUNT": "adalovelace",
        "SLURM_JWT": "hunter5", "TORCH_HOME": "https://ada:hunter6@host/torch",
        "NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NNODES": "1",
        "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1",
        "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "1",
    }  # fmt: skip
    ours = run_meshrun(
        "--report-bug", "--mesh", mesh, home / "train.py",
        "--api-key", "hunter4", "--x=hunter2hunter2", env=env,
    )  # fmt: skip
    parts = dict(re.findall(r"^### ([^\n]+)\n\n```text\n(.*?)\n```$", ours.stdout, re.M | re.S))

    assert (ours.returncode, ours.stderr) == (0, "")
    assert not re.search("hunter|adalovelace", ours.stdout)
    assert parts["Versions"].startswith(f"meshrun {__version__}\nCPython 3.")
    assert "Slurm: step 0 of job 7" in parts["Detected"] or mesh == "dp=0"
    assert "MESHRUN_SECRET=***" in parts["Environment"]
    assert "NCCL_DEBUG=INFO" in parts["Environment"]
    assert parts["Command line"].endswith("~/train.py --api-key *** --x=***")
    assert parts["Plan"].startswith(plan)
    assert not fake_torch.exists()
