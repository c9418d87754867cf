"""How a request and a machine become a plan."""

from typing import Any

import pytest
from msgspec.structs import replace

from meshrun.errors import LayoutError, UsageError
from meshrun.host.machine import HostFacts
from meshrun.layout.spec import parse_mesh
from meshrun.plan.plan import build_plan, complete_plan
from meshrun.plan.rank_env import LaunchFacts, rank_environment
from meshrun.plan.rank_program import Program
from meshrun.plan.request import LaunchRequest
from meshrun.plan.surroundings import depends_on_count
from tests.plans import meeting_of, request_of

PROGRAM = Program(kind="script", target="train.py")


def facts(count: int = 0, cores: int = 16) -> HostFacts:
    return HostFacts(
        hostname="node",
        usable_cores=cores,
        accelerator="cuda" if count else None,
        accelerator_count=count,
    )


def request(mesh: str | None = "dp=2,tp=4", **changes: object) -> LaunchRequest:
    spec = parse_mesh(mesh) if mesh else None
    return request_of(PROGRAM, mesh=spec, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "device", "expected"),
    [
        (0, "auto", ("cpu", "no accelerator found")),
        (8, "auto", ("cuda", "8 found")),
        (4, "auto", ("cpu", "4 cuda found for 8 workers, not enough")),
        (1, "auto", ("cpu", "1 cuda found for 8 workers, not enough")),
        (8, "cpu", ("cpu", "as requested")),
        (8, "cuda", ("cuda", "as requested")),
        (0, "npu", ("npu", "as requested; counted once torch is imported")),
        (8, "my_npu", ("my_npu", "as requested; counted once torch is imported")),
    ],
)
def test_the_device_is_chosen_and_explained(
    count: int, device: str, expected: tuple[str, str]
) -> None:
    """auto uses the accelerator only if each worker can have one."""
    plan = build_plan(request(device=device), facts(count))

    assert (plan.device_type, plan.device.reason) == expected
    assert plan.device.too_few == (count in (1, 4))
    assert plan.uncounted_device == (device if "npu" in device else None)


@pytest.mark.parametrize("count", [0, 4])
def test_more_workers_than_accelerators_is_an_error(count: int) -> None:
    """--device cuda starts no ranks without a GPU."""
    with pytest.raises(LayoutError, match="8 workers need 8 cuda devices"):
        build_plan(request(device="cuda"), facts(count))


@pytest.mark.parametrize(
    ("mesh", "changes", "kind"),
    [
        ("dp=2,tp=4", {}, "auto"),
        ("dp=2,tp=4", {"device": "cuda"}, None),
        ("dp=2,tp=4", {"device": "npu"}, None),  # the zygote counts, which imports torch anyway
        ("dp=2,tp=4", {"device": "npu", "nproc_per_node": "auto"}, "npu"),
        ("dp=-1", {"device": "npu"}, "npu"),
        ("dp=-1", {"device": "npu", "nproc_per_node": 4}, None),
        ("dp=-1", {"device": "cpu", "nproc_per_node": "auto"}, None),
        (None, {}, None),
        (None, {"nproc_per_node": "auto"}, "auto"),
        (None, {"nproc_per_node": "gpu"}, None),
        (None, {"nproc_per_node": "xpu"}, None),
        (None, {"nproc_per_node": "npu"}, "npu"),
    ],
)
def test_when_a_plan_depends_on_devices_that_only_torch_can_count(
    mesh: str | None, changes: dict[str, object], kind: str | None
) -> None:
    """Importing torch in advance takes seconds, so only these plans do it."""
    assert depends_on_count(request(mesh, **changes)) == kind


@pytest.mark.parametrize("device", ["npu", "auto"])
def test_devices_that_torch_has_counted_are_planned_like_others(device: str) -> None:
    """Each worker gets one, or an error says how many there are."""
    counted = replace(facts(), accelerator="npu", accelerator_count=2)
    plan = build_plan(request("dp=-1", device=device), counted)

    assert [rank.device for rank in plan.ranks()] == ["npu:0", "npu:1"]
    assert plan.uncounted_device is None
    with pytest.raises(LayoutError, match="8 workers need 8 npu devices, but this machine has 2"):
        build_plan(request(device="npu"), counted)


def test_a_rank_cannot_be_limited_to_one_device_of_another_package() -> None:
    """All ranks would use the first."""
    with pytest.raises(UsageError, match=r"limits a rank to one npu device"):
        build_plan(request(device="npu", virtual_local_rank=True), facts())


def test_a_dry_run_plans_for_other_machines() -> None:
    """It shows a plan for GPUs on a machine without them."""
    plan = build_plan(request(device="cuda"), facts(0), check_host=False)

    assert plan.rank(5).device == "cuda:5"


def test_a_device_with_an_index_is_refused() -> None:
    """The local rank gives the index."""
    with pytest.raises(UsageError, match="device type such as `cuda`"):
        build_plan(request(device="cuda:1"), facts(8))


def test_minus_one_gives_each_accelerator_a_worker() -> None:
    """Inferring a size needs a number of workers, which is that of accelerators."""
    assert build_plan(request("dp=-1"), facts(4)).layout.sizes == (4,)
    with pytest.raises(LayoutError, match="number of workers is unknown"):
        build_plan(request("dp=-1"), facts(0))


def test_without_a_mesh_the_program_chooses_its_device() -> None:
    """As under torchrun: one worker by default, and no device."""
    plan = build_plan(request(None), facts(8))

    assert (plan.layout.world_size, plan.rank(0).device) == (1, None)


def environment_of(rank: int, base: dict[str, str], **changes: object) -> dict[str, str]:
    plan = build_plan(request(**changes), facts(cores=16))  # type: ignore[arg-type]
    launch = LaunchFacts(
        run_id="abc",
        master_addr="127.0.0.1",
        master_port=4321,
        interface="lo",
    )
    return rank_environment(plan, plan.rank(rank), launch, base, error_file="/run/error.json")


def test_a_rank_gets_the_variables_of_torchrun() -> None:
    """Names and values as torchrun 2.13 sets them."""
    env = environment_of(5, {})

    assert env == {
        "RANK": "5",
        "LOCAL_RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "8",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "8",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4321",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "abc",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/run/error.json",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "2",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
        "MESHRUN_RUN_ID": "abc",
        "MESHRUN_GENERATION": "0",
        "MESHRUN_MESH": "dp=2,tp=4",
        "MESHRUN_DEVICE": "cpu",
        "MESHRUN_NPROC_PER_NODE": "8",
    }


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_node_needs_devices_for_its_own_workers(device: str) -> None:
    """Not for as many as the node with the most, which has more devices too."""
    there = meeting_of(endpoint="node0:29500")
    asked = request("dp=-1", nnodes=2, nproc_per_node=2, device=device, rendezvous=there)
    plan = complete_plan(build_plan(asked, facts(2)), node_rank=1, nproc_per_node=(4, 2))

    assert plan.device_type == "cuda"
    assert [rank.device for rank in plan.ranks_of_node()] == ["cuda:0", "cuda:1"]
    assert plan.omp_num_threads == 8


@pytest.mark.parametrize(
    ("changes", "roles", "expected"),
    [
        # torchrun 2.13 with --role trainer, reader, trainer and 2, 1, 3 workers
        (
            {"mesh": None, "nproc_per_node": (2, 1, 3)},
            ("trainer", "reader", "trainer"),
            [(0, 5), (1, 5), (0, 1), (2, 5), (3, 5), (4, 5)],
        ),
        ({"mesh": None, "nproc_per_node": (2, 1)}, ("a", "a"), [(0, 3), (1, 3), (2, 3)]),
        ({"mesh": None, "nproc_per_node": (2, 1)}, (), [(0, 3), (1, 3), (2, 3)]),
        (
            {"mesh": parse_mesh("tp=2,dp=2"), "intra_node": ("tp",), "place": "auto"},
            ("a", "b"),
            [(0, 2), (0, 2), (1, 2), (1, 2)],
        ),
    ],
    ids=["two roles on three nodes", "one role", "not joined yet", "renumbered ranks"],
)
def test_roles_are_counted_over_nodes(
    changes: dict[str, Any], roles: tuple[str, ...], expected: list[tuple[int, int]]
) -> None:
    """Each role numbers its ranks from 0, in the order of ranks."""
    counts = changes.pop("nproc_per_node", (2, 2))
    asked = request_of(PROGRAM, nnodes=len(counts), nproc_per_node=counts, **changes)
    plan = build_plan(asked, facts())
    plan = complete_plan(plan, node_rank=0, nproc_per_node=counts, roles=roles)

    assert [plan.place_in_role(rank) for rank in range(len(expected))] == expected


def test_variables_that_the_user_set_are_kept() -> None:
    base = {
        "OMP_NUM_THREADS": "7",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "ib0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    }

    assert not base.keys() & environment_of(0, base).keys()


def test_more_workers_than_cores_get_one_thread_each() -> None:
    """Cores are divided among the workers, and none gets fewer than one thread."""
    assert environment_of(0, {}, mesh="64")["OMP_NUM_THREADS"] == "1"
