"""Options and variables that users of torchrun have in their scripts and templates."""

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshrun.cli.end import returncode
from tests.kit import PROGRAMS, environments, run_meshrun, start_meshrun
from tests.nvml import card


def test_variables_are_options(fake_torch: object) -> None:
    """Kubeflow's trainer sets them; the command line overrides them."""
    numbers = {"PET_NPROC_PER_NODE": "3", "PET_NNODES": "1", "PET_NODE_RANK": "0"}
    others = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MAX_RESTARTS": "3", "PET_ROLE": "trainer"}
    env = {**numbers, **others, "MESHRUN_MAX_RESTART": "5"}
    words = ("--nproc-per-node", "2", "--no-prefix", PROGRAMS / "environment.py")
    ours = run_meshrun(*words, env=env)
    found = [json.loads(line) for line in ours.stdout.splitlines()]

    assert [one["WORLD_SIZE"] for one in found] == ["2", "2"]
    assert {one["ROLE_NAME"] for one in found} == {"trainer"}
    assert {one["TORCHELASTIC_MAX_RESTARTS"] for one in found} == {"3"}
    slip = "meshrun: unknown environment variable MESHRUN_MAX_RESTART; did you mean"
    assert ours.stderr.count(slip) == 1, ours.stderr


@pytest.mark.parametrize("yes", ["1", "true", "True", "yes", "on"])
def test_a_switch_in_a_variable_may_be_written_in_many_ways(yes: str, fake_torch: object) -> None:
    """torchrun accepts only 1 and 0."""
    ours = run_meshrun("true", env={"PET_NO_PYTHON": yes})

    assert ours.returncode == 0, ours.stderr


@pytest.mark.parametrize("no", ["0", "false", "off", ""])
def test_a_switch_in_a_variable_may_be_off_in_many_ways(no: str, fake_torch: object) -> None:
    """An empty variable counts as not set."""
    ours = run_meshrun(PROGRAMS / "echo.py", env={"PET_NO_PYTHON": no})

    assert ours.returncode == 0, ours.stderr


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PET_MAX_RESTARTS", "many", "at least 0, found `many` in PET_MAX_RESTARTS"),
        (
            "PET_STANDALONE",
            "perhaps",
            "PET_STANDALONE must be true or false, 1 or 0, found `perhaps`",
        ),
        ("MESHRUN_MESH", "dp=", "in MESHRUN_MESH"),
        ("MESHRUN_NAMES", "a,b", "--names requires --mesh (MESHRUN_NAMES=a,b)"),
        ("PET_REDIRECTS", "9", "in PET_REDIRECTS"),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "x", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT expects a time"),
        ("PET_NNODES", "2", "--nnodes 2 in PET_NNODES asks for more"),
    ],
)
def test_a_bad_variable_is_named(name: str, value: str, message: str) -> None:
    """The error does not blame the command line."""
    alone = {"PET_STANDALONE": "1"} if name == "PET_NNODES" else {}
    ours = run_meshrun(PROGRAMS / "echo.py", env={**alone, name: value})

    assert (ours.returncode, ours.stdout) == (2, "")
    assert message in ours.stderr


def test_of_two_bad_variables_the_one_whose_text_is_shown_is_named() -> None:
    """MESHRUN_MESH and MESHRUN_NAMES are parsed together."""
    ours = run_meshrun(PROGRAMS / "echo.py", env={"MESHRUN_MESH": "1x1", "MESHRUN_NAMES": "dp"})

    assert ours.returncode == 2
    assert "mesh `1x1` has 2 dims, but --names has 1 in MESHRUN_NAMES\n" in ours.stderr


def test_a_launch_inside_a_rank_is_its_own(tmp_path: Path, fake_torch: object) -> None:
    """The outer launch's MESHRUN_MESH describes the rank; it is not an option of the inner one."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, subprocess, sys\n"
        f"inner = [sys.executable, '-m', 'meshrun', {str(PROGRAMS / 'environment.py')!r}]\n"
        "os.environ['MESHRUN_MESH'] = 'dp=4'\n"
        "sys.exit(subprocess.run(inner).returncode)\n"
    )
    ours = run_meshrun("--no-prefix", program)
    inner = json.loads(ours.stdout.removeprefix("[rank 0] "))

    assert (inner["WORLD_SIZE"], "MESHRUN_MESH" in inner) == ("1", False)


@pytest.mark.parametrize(
    ("given", "expected"), [(None, ["0", "1"]), ("4,6", ["4", "6"]), ("GPU-aa,GPU-bb", None)]
)
def test_a_virtual_local_rank(
    given: str | None, expected: list[str] | None, fake_torch: object
) -> None:
    """Each rank sees one device, as device 0."""
    env = {"CUDA_VISIBLE_DEVICES": given} if given else {}
    found = environments("--nproc-per-node", "2", "--virtual-local-rank", env=env)

    assert [one["LOCAL_RANK"] for one in found] == ["0", "0"]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == (expected or ["GPU-aa", "GPU-bb"])


def test_too_few_devices_for_virtual_local_ranks(fake_torch: Path) -> None:
    """Two ranks need two devices."""
    ours = run_meshrun(
        "--nproc-per-node", "2", "--virtual-local-rank", PROGRAMS / "echo.py",
        env={"CUDA_VISIBLE_DEVICES": "0"},
    )  # fmt: skip

    assert ours.returncode == 2
    assert "2 workers, but CUDA_VISIBLE_DEVICES lists 1" in ours.stderr
    assert not fake_torch.exists()


def test_gpus_are_chosen(fake_torch: Path, fake_nvml: Callable[[list[Any]], None]) -> None:
    """--gpus selects among the GPUs that the launcher sees; a mistake starts nothing."""
    fake_nvml([card(f"GPU-{bus}", bus) for bus in range(4)])
    refused = run_meshrun("--gpus", "GPU-7", PROGRAMS / "environment.py")

    assert (refused.returncode, fake_torch.exists()) == (2, False)
    assert "has 4 GPUs: GPU-0, GPU-1, GPU-2, GPU-3" in refused.stderr
    found = environments(
        "--nproc-per-node", "2", "--gpus", "2,0", env={"CUDA_VISIBLE_DEVICES": "3,1,0"}
    )
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["0,3", "0,3"]


def test_gpus_are_checked(
    fake_torch: Path, fake_nvml: Callable[[list[Any]], None], tmp_path: Path
) -> None:
    """A broken GPU ends the launch before anything starts; a lesser fault is a warning."""
    broken = {"nvmlDeviceGetTotalEccErrors 1 0": 2}
    fake_nvml([card("GPU-0", 1, links=["switch", None]), card("GPU-1", 2, **broken)])
    words = ("--check-gpus", "--node-history", tmp_path / "history", PROGRAMS / "echo.py")

    for how in ((), ("--dry-run",)):
        refused = run_meshrun("--gpus", "0,1", *how, *words)
        assert (refused.returncode, fake_torch.exists()) == (71, False)
        assert "meshrun: GPU 1: 2 uncorrected memory errors" in refused.stderr
        assert "error: --check-gpus: 1 of 2 GPUs failed the check: 1" in refused.stderr
        assert refused.stdout.startswith("no mesh: 1 rank") == bool(how)
    (line,) = (tmp_path / "history").read_text().splitlines()
    assert "1 of 2 GPUs failed the check" in json.loads(line)["reason"]
    ours = run_meshrun("--gpus", "0", *words)
    assert ours.returncode == 0, ours.stderr
    assert "meshrun: GPU 0: 1 of 2 NVLinks are down" in ours.stderr


@pytest.mark.parametrize("method", ["fork", "exec"])
def test_ranks_are_bound_to_cores(method: str, fake_torch: object) -> None:
    """Exclusive shares are disjoint and within the cores that meshrun may use."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    ours = run_meshrun(
        "--nproc-per-node", "2", "--numa-binding", "exclusive", "--start-method", method,
        "--no-prefix", PROGRAMS / "affinity.py",
    )  # fmt: skip
    first, second = (set(json.loads(line)) for line in ours.stdout.splitlines())

    assert first
    assert second
    assert first.isdisjoint(second)
    assert first | second <= allowed


def test_a_port_that_was_asked_for(fake_torch: object) -> None:
    """The store listens on that address only."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (found,) = environments("--master-addr", "localhost", "--master-port", str(port))

    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("localhost", str(port))


def test_a_port_that_is_taken(fake_torch: Path) -> None:
    """The error names it, and nothing is started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for option, value in (
            ("--master-port", str(port)),
            ("--rdzv-endpoint", f"127.0.0.1:{port}"),
        ):
            ours = run_meshrun(option, value, PROGRAMS / "echo.py")

            assert ours.returncode == 71
            error, _, hint = ours.stderr.splitlines()
            assert error == f"error: port {port} on 127.0.0.1 is in use"
            assert option in hint
    assert not fake_torch.exists()


def test_options_that_standalone_ignores(fake_torch: object) -> None:
    """--standalone generates a run id and uses one node, whatever the PET_ variables say."""
    asked = ("--standalone", "--rdzv-id", "job7", "--signals-to-handle", "SIGTERM,SIGFOO,TERMM")
    ours = run_meshrun(
        "--no-prefix", *asked, PROGRAMS / "environment.py",
        env={"PET_NNODES": "2", "PET_PRINT_COMPLETION": "bash"},
    )  # fmt: skip
    found = json.loads(ours.stdout)

    assert found["TORCHELASTIC_RUN_ID"] != "job7"
    assert found["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM"
    assert "OMP_NUM_THREADS" not in found
    assert ours.stderr == (
        "meshrun: --signals-to-handle: unknown signal `SIGFOO`; ignoring it\n"
        "meshrun: --signals-to-handle: unknown signal `TERMM` (did you mean `SIGTERM`?);"
        " ignoring it\n"
    )


def test_options_after_the_program_are_warned_of(fake_torch: object, tmp_path: Path) -> None:
    """Except those that its file mentions, or that are also given before it."""
    program = tmp_path / "program.py"
    program.write_text("parser_knows = '--log-dir'\n")
    ours = run_meshrun(
        "--max-restarts", "1", program,
        "--mesh", "dp=2", "--log_dir", "x", "--nproc_per_node=2", "--max-restarts", "2", "--device",
    )  # fmt: skip

    assert (ours.returncode, ours.stdout) == (0, "")
    assert ours.stderr == "".join(
        f"meshrun: passing {name} to the program; put options of meshrun before the program\n"
        for name in ("--mesh", "--nproc-per-node")
    )


def test_the_run_id(fake_torch: object) -> None:
    """Ranks see the value of --rdzv-id."""
    (found,) = environments("--rdzv-id", "job7", "--rdzv-backend", "c10d")

    assert found["TORCHELASTIC_RUN_ID"] == "job7"


@pytest.mark.parametrize(
    ("code", "of_rank", "torchruns"),
    [(0, True, 0), (2, True, 1), (2, False, 2), (75, False, 1), (-signal.SIGTERM, False, 1)],
)
def test_every_failure_is_1_to_torchrun(code: int, of_rank: bool, torchruns: int) -> None:
    """Except for a wrong command line; a rank may exit with the same code."""
    assert returncode("torchrun", code, of_rank=of_rank) == torchruns
    assert returncode("worker", code, of_rank=of_rank) == code


def test_torchrun_s_exit_code(fake_torch: object) -> None:
    """1 for any failure."""
    ours = run_meshrun(
        "--nproc-per-node", "2", "--exit-code", "torchrun", PROGRAMS / "end.py", "SIGSEGV"
    )

    assert ours.returncode == 1


def test_torchrun_s_exit_code_of_what_cannot_start() -> None:
    """1 even if no rank ran."""
    ours = run_meshrun("--exit-code", "torchrun", "--no-python", "no-such-command")

    assert ours.returncode == 1


def test_a_signal_that_was_asked_for_ends_the_launch(fake_torch: object, tmp_path: Path) -> None:
    """--signals-to-handle: SIGUSR1 stops the ranks, and the launch ends by it."""
    with start_meshrun(
        "--signals-to-handle", "SIGTERM,USR1", PROGRAMS / "wait.py", folder=tmp_path
    ) as running:
        running.wait_for("up")
        running.signal(signal.SIGUSR1)

        assert running.wait() == 128 + signal.SIGUSR1
        assert "stopped by SIGUSR1" in running.stderr


def test_a_timer_that_expires_ends_its_rank(fake_torch: object) -> None:
    """Only timers of the launch's own processes count."""
    ours = run_meshrun(
        "--nproc-per-node", "2", PROGRAMS / "timed.py", env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
    )

    assert ours.returncode == 137
    assert ": its timer `too late` expired\n" in ours.stderr
    assert "error: rank 1 was killed by SIGKILL (its timer `too late` expired)\n" in ours.stderr


def test_the_cause_is_passed_on_to_an_outer_launcher(tmp_path: Path, fake_torch: object) -> None:
    """Through TORCHELASTIC_ERROR_FILE, as torch elastic does."""
    path = tmp_path / "error.json"
    run_meshrun(
        "--nproc-per-node", "2", PROGRAMS / "end.py", "raise",
        env={"TORCHELASTIC_ERROR_FILE": str(path)},
    )  # fmt: skip

    assert json.loads(path.read_text())["message"]["message"] == "ValueError: the loss is nan"


def test_a_report_lists_the_failures(tmp_path: Path, fake_torch: object) -> None:
    """The cause comes first."""
    path = tmp_path / "report.json"
    run_meshrun("--nproc-per-node", "2", "--report", path, PROGRAMS / "end.py", "3")
    report = json.loads(path.read_text())

    assert report["schema"] == {"name": "meshrun.result", "version": 1}
    assert (report["exit_code"], report["failures"][0]["rank"]) == (3, 1)


@pytest.mark.parametrize("path", ["-", "link"])
def test_a_report_goes_to_stdout(path: str, tmp_path: Path, fake_torch: object) -> None:
    """A link to a descriptor, such as ``/dev/stdout``, is not replaced by a file."""
    (link := tmp_path / "link").symlink_to("/proc/self/fd/1")
    ours = run_meshrun("--report", path, PROGRAMS / "echo.py", cwd=tmp_path)

    assert json.loads(ours.stdout.splitlines()[-1])["exit_code"] == 0, ours.stderr
    assert [each.is_symlink() for each in tmp_path.glob("l*")] == [True]
    assert link.is_symlink()


def test_a_report_that_cannot_be_written_starts_nothing(tmp_path: Path, fake_torch: Path) -> None:
    """Nor on other hosts."""
    for words in ([], ["--hosts", "localhost,elsewhere"]):
        ours = run_meshrun(*words, "--report", tmp_path / "no" / "x", PROGRAMS / "echo.py")

        assert (ours.returncode, ours.stdout) == (2, "")
        assert f"--report: folder `{tmp_path}/no` does not exist" in ours.stderr
    assert not fake_torch.exists()
