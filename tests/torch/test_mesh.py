"""The mesh in real ranks, over real gloo groups."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import PROGRAMS, run_meshrun
from tests.variations import ordinary

pytestmark = pytest.mark.torch
MESH = ("--mesh", "2x4", "--names", "dp,tp")
NAMED, NONE = ["--mesh", "dp=2,tp=2"], ["--nproc-per-node", "4"]


def asked(text: str) -> list[dict[str, object]]:
    found = [json.loads(line.partition("] ")[2]) for line in text.splitlines()]
    return sorted(found, key=lambda entry: entry["rank"])  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["fork", pytest.param("exec", marks=pytest.mark.nightly)])
def test_every_rank_has_its_mesh(method: str) -> None:
    """A real DeviceMesh, built before the program starts; every call and thread gets the same."""
    shape = MESH if method == "fork" else ("--mesh", "dp=1,tp=2")
    ours = run_meshrun(*shape, "--start-method", method, PROGRAMS / "ask_mesh.py")
    sizes = [2, 4] if method == "fork" else [1, 2]

    assert ours.returncode == 0, ours.stderr
    for rank, found in enumerate(asked(ours.stdout)):
        row = range(rank // sizes[1] * sizes[1], (rank // sizes[1] + 1) * sizes[1])
        assert found == {
            "rank": rank,
            "type": "torch.distributed.device_mesh.DeviceMesh",
            "shape": sizes,
            "names": ["dp", "tp"],
            "coordinate": [rank // sizes[1], rank % sizes[1]],
            "device": "cpu",
            "tp_sum": float(sum(row)),
            "same": True,
            "before": True,
            "local_rank": str(rank),
            "threads": max(1, len(os.sched_getaffinity(0)) // (sizes[0] * sizes[1])),
        }


@pytest.mark.nightly
def test_torchrun_builds_the_same_mesh_on_first_use() -> None:
    """With MESHRUN_MESH set, another launcher may start the program."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*words, "--redirects=0", PROGRAMS / "ask_mesh.py"],
        env={**os.environ, "MESHRUN_MESH": "dp=-1,tp=2"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = sorted(
        (json.loads(line) for line in result.stdout.splitlines()), key=lambda e: e["rank"]
    )

    assert result.returncode == 0, result.stderr
    assert [entry["coordinate"] for entry in found] == [[0, 0], [0, 1]]
    assert all(entry["same"] and not entry["before"] for entry in found)


def test_a_plain_python_gets_a_mesh_of_one_rank() -> None:
    """An open size in MESHRUN_MESH becomes 1."""
    result = subprocess.run(
        [sys.executable, PROGRAMS / "ask_mesh.py"],
        env={**os.environ, "MESHRUN_MESH": "dp=-1,tp=1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["shape"] == [1, 1]


def test_without_a_mesh_the_error_says_how_to_get_one() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import meshrun; meshrun.current_mesh()"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 1
    assert result.stderr.splitlines()[-2:] == [
        "meshrun.errors.MeshError: there is no mesh in this process",
        "hint: launch the program with `meshrun --mesh dp=2,tp=4 ...`, set"
        " MESHRUN_MESH=dp=2,tp=4 under torchrun, srun or mpirun, or call"
        " current_mesh(fallback='dp=-1')",
    ]


WRONG_USES = (
    (
        'current_mesh("pp")',
        "the mesh has no dim `pp`",
        "use `dp`, `tp`, or launch with a different --mesh",
    ),
    (
        'current_mesh("tp", "dp")',
        "dims `tp`, `dp` are not in the mesh's order",
        'current_mesh("dp", "tp")',
    ),
    (
        "os.fork() or current_mesh(); os.wait()",
        "this process is a child of rank 0 and has no process groups",
        "use the mesh in the rank itself and pass plain numbers to its children, or call"
        " current_layout() here",
    ),
    (
        "dist.init_process_group('nccl')",
        "init_process_group(`nccl`) conflicts with meshrun's process group, which uses gloo",
        "remove the argument: --device and --backend determine the backend; or launch without"
        " --mesh",
    ),
    (
        "dist.destroy_process_group(); current_mesh()",
        "the process group of this mesh was destroyed",
        "call current_mesh() before destroy_process_group()",
    ),
)


def test_wrong_uses_have_clear_errors(tmp_path: Path) -> None:
    """Each error names the request and says what to do instead."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os\nimport torch.distributed as dist\nfrom meshrun import current_mesh\n"
        + "".join(
            f"pid = os.getpid()\ntry:\n    {code}\n"
            "except Exception as error:\n"
            "    print(type(error).__name__, error, flush=True)\n"
            "    os.getpid() == pid or os._exit(0)\n"
            for code, _, _ in WRONG_USES
        )
    )
    ours = run_meshrun("--mesh", "dp=1,tp=1", "--no-prefix", program)

    assert (ours.stdout, ours.returncode) == (
        "".join(f"MeshError {message}\nhint: {hint}\n" for _, message, hint in WRONG_USES),
        0,
    ), ours.stderr


@pytest.mark.parametrize(
    ("words", "mesh"),
    ordinary(
        [(words, mesh) for words in ([], ["guarded"], ["again"]) for mesh in (NAMED, NONE)],
        (["again"], NAMED),
    ),
)  # fmt: skip
def test_programs_that_create_the_group_themselves_run(words: list[str], mesh: list[str]) -> None:
    """Guarded or not, once or again after destroying it, with and without a mesh."""
    ours = run_meshrun(*mesh, "--no-prefix", PROGRAMS / "own_init.py", *words)
    expected = ["sum 4 gloo"] * 4 + (["again 4"] * 8 if words == ["again"] else [])

    assert ours.returncode == 0, ours.stderr
    assert sorted(ours.stdout.splitlines(), reverse=True) == expected


@pytest.mark.nightly
def test_a_second_group_in_one_program_is_still_torchs_error() -> None:
    """Only the first call returns the existing group."""
    ours = run_meshrun("--mesh", "dp=2", PROGRAMS / "own_init.py", "twice")

    assert ours.returncode == 1
    assert "ValueError: trying to initialize the default process group twice!" in ours.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("methods", ["fork spawn forkserver", "spawn"])
def test_loader_workers_of_every_start_method_work(methods: str) -> None:
    """They run beside the mesh and do not get it."""
    ours = run_meshrun("--mesh", "dp=1", "--no-prefix", PROGRAMS / "loader.py", *methods.split())

    assert ours.returncode == 0, ours.stderr
    assert ours.stdout.splitlines() == [f"{method} 28" for method in methods.split()]


@pytest.mark.parametrize("mesh", ordinary([["--mesh", "dp=2"], ["--mesh", "2"]], ["--mesh", "2"]))
def test_unnamed_dims_are_torchs(mesh: list[str]) -> None:
    """torch's mesh has no names either; the prefix is the coordinate."""
    program = PROGRAMS / "dns.py"
    ours = run_meshrun(*mesh, program)
    label = "dp" if "=" in mesh[1] else ""

    assert sorted(ours.stdout.splitlines()) == [f"[{label}{rank}] (2,)" for rank in range(2)]


@pytest.mark.parametrize("form", [pytest.param([], marks=pytest.mark.nightly), ["own", "destroy"]])
def test_a_program_that_keeps_its_mesh_ends_with_its_own_status(form: list[str]) -> None:
    """Under torchrun, half of such programs are aborted at their end."""
    ours = run_meshrun("--mesh", "2x4", PROGRAMS / "keep_mesh.py", "0", *form)
    assert (ours.returncode, ours.stderr) == (0, "")


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", [[], ["destroy"], ["own"], ["own", "destroy"]])
def test_two_hundred_ranks_end_with_their_own_status(form: list[str]) -> None:
    """For each form, 200 of 200 times."""
    for _ in range(25):
        ours = run_meshrun("--mesh", "2x4", PROGRAMS / "keep_mesh.py", "0", *form)
        assert (ours.returncode, ours.stderr) == (0, "")


def test_importing_meshrun_imports_neither_torch_nor_rich() -> None:
    """The package costs little until it is used."""
    code = "import meshrun, sys; meshrun.Layout; print({'torch', 'rich'} & {*sys.modules})"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert result.stdout == "set()\n"
