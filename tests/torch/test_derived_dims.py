"""Joined dims and views of a real mesh: their groups, what they share, and their options."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.kit import PROGRAMS, run_meshrun

pytestmark = pytest.mark.torch
PROGRAM = PROGRAMS / "derived_dims.py"
MESH = (
    *("--mesh", "dp=2,cp=2,tp=2", "--flatten", "dp_cp=dp+cp"),
    *("--view", "moe:dp=2,efsdp=-1,ep=2", "--view", "flat:all=8"),
    *("--device", "cpu", "--no-prefix"),
)


def planned(*options: str) -> list[str]:
    """Return the groups that a dry run shows for each rank."""
    ours = run_meshrun(*MESH, *options, "--dry-run", "--format", "json", PROGRAM)
    return list(json.loads(ours.stdout)["communicators"])


def test_derived_dims_have_the_groups_of_the_layout() -> None:
    """Each is built once, with as many groups as planned, and FSDP accepts a joined one."""
    ours = run_meshrun(
        *MESH, "--timeout", "70s", "--timeout", "efsdp=50s", "--timeout", "dp_cp=40s", PROGRAM
    )
    assert ours.returncode == 0, ours.stderr
    found = json.loads(ours.stdout)
    names = planned()
    assert found["groups"] == len(names), names
    assert found["shared"]
    assert found["timeouts"] == {
        "world": 70, "dp": 70, "tp": 70, "dp_cp": 40, "efsdp": 50, "ep": 70,
    }  # fmt: skip
    assert found["refused"] == [
        "the mesh has no dim `zz`; use `dp`, `cp`, `tp`, `dp_cp`, `efsdp`, `ep`, `all`,"
        " or launch with a different --mesh",
        "dims `cp`, `ep` do not all belong to one mesh; pass dims of the mesh itself, or dims"
        " of one view",
        "dims `cp`, `dp_cp` have ranks in common; None",
        'dims `tp`, `dp` are not in the mesh\'s order; current_mesh("dp", "tp")',
    ]


@pytest.mark.nightly
def test_a_dim_with_its_own_back_end_has_its_own_groups() -> None:
    """It shares no group with other dims, and the plan counts it."""
    more = ("--backend", "ep=gloo", "--backend", "dp_cp=gloo")
    ours = run_meshrun(*MESH, *more, PROGRAM)

    assert len(planned(*more)) == len(planned()) + 1
    assert "AssertionError" not in ours.stderr, ours.stderr
    assert ours.returncode == 0, ours.stderr
    assert json.loads(ours.stdout)["groups"] == len(planned(*more))
    assert not json.loads(ours.stdout)["shared"]


@pytest.mark.nightly
def test_torchrun_and_init_mesh_build_them_too() -> None:
    """From the variables, or from the program's own arguments."""
    program = (
        "from meshrun import current_mesh, init_mesh\n"
        "import torch.distributed as dist\n"
        "SETUP\n"
        "print(current_mesh('ab').mesh.tolist(), current_mesh('v', ).mesh_dim_names)\n"
        "dist.destroy_process_group()\n"
    )
    env = {"MESHRUN_MESH": "a=1,b=-1", "MESHRUN_FLATTEN": "a+b", "MESHRUN_VIEW": "v:ab=-1"}
    words = "init_mesh('a=1,b=-1', flatten=['ab=a+b'], views=['v:x=-1,y=1'])"
    for setup, variables in (("", {**env, "MESHRUN_FLATTEN": "ab=a+b"}), (words, {})):
        text = program.replace("SETUP", setup)
        ran = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
             "--no-python", sys.executable, "-c", text],
            env={**os.environ, **variables}, capture_output=True, text=True, check=False,
            timeout=100,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.count("[0, 1]") == 2, ran.stdout
