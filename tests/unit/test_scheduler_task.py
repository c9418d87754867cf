"""Which variables a task of a scheduler gets, and which processes get none."""

from __future__ import annotations

import pytest

from meshrun import MeshError, current_layout
from meshrun.host.network import own_address_towards, own_addresses, resolve
from meshrun.mesh.scheduler_task import join_task, launch_environment

STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "sl0",
    "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_NODEID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1",
}  # fmt: skip
ONE = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0",
       "SLURM_LOCALID": "0"}  # fmt: skip
RANKS = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
}  # fmt: skip


def without_pytest(environ: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith("PYTEST_")}


def test_a_task_gets_what_init_process_group_reads(environ: dict[str, str]) -> None:
    """On one node over loopback; variables that are already set stay."""
    environ.update(STEP, MASTER_PORT="29511", LOCAL_RANK="0")
    loopback = own_addresses()["127.0.0.1"]
    join_task()

    place = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511",
        "GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}",
    }  # fmt: skip
    assert without_pytest(environ) == {**STEP, **RANKS, **place, "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    "changed", [ONE, {"RANK": "0"}, {"WORLD_SIZE": "1"}, {"SLURM_STEP_ID": str(0xFFFFFFFB)}]
)
def test_processes_that_get_nothing(environ: dict[str, str], changed: dict[str, str]) -> None:
    """A single task, a rank of a launcher, and a batch script."""
    environ.update({**STEP, **changed})
    before = dict(environ)
    join_task()

    assert environ == before == launch_environment()


def test_a_layout_changes_no_variable(environ: dict[str, str]) -> None:
    """It only reads them."""
    environ.update(STEP)
    layout = current_layout()

    assert (layout.own_rank, layout.nproc_per_node) == (1, (2,))
    assert without_pytest(environ) == STEP


def test_a_broken_variable_is_an_error(environ: dict[str, str]) -> None:
    environ.update({**STEP, "SLURM_PROCID": "2"})
    with pytest.raises(MeshError, match="SLURM_PROCID must be less than the total of 2"):
        current_layout()


def test_a_first_node_whose_name_does_not_resolve(environ: dict[str, str]) -> None:
    """The error says what was tried and what to set."""
    two = {
        "SLURM_STEP_NODELIST": "no.such.name.invalid,sl1", "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "1", "SLURM_LOCALID": "0",
    }  # fmt: skip
    environ.update({**STEP, **two})
    with pytest.raises(MeshError, match=r"tried `no\.such\.name\.invalid`\nhint: .*MASTER_ADDR"):
        join_task()


def test_a_job_without_a_name_needs_a_port(environ: dict[str, str]) -> None:
    """No job id says where its processes meet."""
    names = {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
    environ.update({f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()})
    with pytest.raises(MeshError, match="Open MPI sets no job id"):
        join_task()


def test_loopback_is_no_address_for_others() -> None:
    """However it is written; nor is a name that does not resolve."""
    assert [resolve(name) for name in ("127.0.1.1", "localhost", "::1", "no.such.invalid")] == [
        [], [], [], []
    ]  # fmt: skip
    assert resolve("10.77.0.1") == ["10.77.0.1"]
    assert own_address_towards("127.0.0.1") == "127.0.0.1"
