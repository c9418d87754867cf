"""meshrun --where: what it detects, and what a launch would start."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.kit import run_meshrun
from tests.schedulers import DSTACK, FLUX, MPI, SAGEMAKER


def where(env: dict[str, str], *words: str) -> tuple[dict[str, str], int]:
    """Return the text of each row, the last one for each name, and the exit code."""
    done = run_meshrun("--where", *words, env=env)
    rows = [line.split("  ", 1) for line in done.stdout.splitlines()]
    assert done.stderr == ""
    return {name: text.strip() for name, text in rows}, done.returncode


def test_nothing_detected() -> None:
    """This host is the only node."""
    found, code = where({}, "--mesh", "dp=2", "--device", "cpu")

    assert (found["system"], found["nodes"], code) == ("none detected", "1", 0)
    assert found["starts"] == "a launcher with 2 workers on this host"


def test_a_range_of_nodes() -> None:
    found, _ = where({}, "--nnodes", "1:3", "--rdzv-backend", "c10d")

    assert found["nodes"] == "1 to 3"


def test_a_node_of_several_as_json() -> None:
    """All facts, and the variables they come from."""
    words = ("--where", "--mesh", "dp=4", "--device", "cpu", "--format", "json")
    done = run_meshrun(*words, env={**DSTACK, "MESHRUN_SECRET": "of the launch, which is long"})
    found = json.loads(done.stdout)

    assert (found["system"], found["allocation"]["hosts"]) == ("dstack", ["10.0.0.4", "10.0.0.9"])
    assert found["variables"] == {
        name: value for name, value in DSTACK.items() if "GPUS" not in name
    }
    assert found["launch"] == {
        "nodes": 2, "least_nodes": 2, "node_rank": 1, "workers": [2, 2], "device": "cpu",
        "starter": None, "notes": [],
        "hosts": [],
        "meeting": {"backend": "static", "host": "10.0.0.4", "port": found["launch"]["meeting"]
                    ["port"], "also": [], "run_id": "mine", "secret": True},
    }  # fmt: skip
    assert "of the launch" not in done.stdout


@pytest.mark.parametrize(
    ("env", "words", "error"),
    [
        (MPI, (), "Open MPI started meshrun 4 times on 2 nodes"),
        ({**FLUX, "PMI_FD": ""}, (), "Flux does not tell processes the address of node 0"),
        ({**SAGEMAKER, "SM_HOSTS": ""}, (), "SM_CURRENT_HOST=algo-2 is set without SM_HOSTS"),
        (DSTACK, ("--nnodes", "3"), "--nnodes 3, but dstack allocated 2"),
        ({}, ("--mesh", "dp=x"), ""),
    ],
)
def test_what_would_fail(env: dict[str, str], words: tuple[str, ...], error: str) -> None:
    """With the launch's error and exit code, and still with all that is known."""
    if not error:
        assert run_meshrun("--where", *words).returncode == 2
        return
    found, code = where(env, *words)

    assert (code, found["starts"]) == (2, "nothing")
    assert found["error"].startswith(error)
    assert env.get("OMPI_MCA_orte_precondition_transports", "no secret") not in found.values()


def test_a_script_with_hosts(tmp_path: Path) -> None:
    """All its hosts, and how launchers are started on them."""
    (tmp_path / "nodes").write_text(f"{os.uname().nodename}\nn2\n")
    env = {"PBS_JOBID": "5", "PBS_NODEFILE": str(tmp_path / "nodes")}
    alone, _ = where(env)
    both, _ = where(env, "--nnodes", "2")

    assert alone["starts"] == "a launcher with 1 worker on this host"
    assert alone["note"].endswith("launching on one of 2 nodes; to use all: --nnodes 2")
    assert both["starts"] == f"a launcher on each of {os.uname().nodename}, n2, with ssh"
    assert both["allocation"].endswith("this is node 0")
