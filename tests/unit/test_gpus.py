"""The GPUs of a machine: which ones a launch sees, and which ones it gets."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import psutil
import pytest
from msgspec.structs import replace

from meshrun.errors import LayoutError, UsageError
from meshrun.host.detect_host import add_nics
from meshrun.host.gpu_state import read_use
from meshrun.host.gpus import filter_visible, visible_gpus
from meshrun.host.machine import Gpu, GpuLinks, HostFacts, Nics, Topology
from meshrun.host.network import networks_of_interfaces
from meshrun.host.nvml import load_nvml
from meshrun.host.reactor import Reactor
from meshrun.host.visibility import listed_devices, visibility_variables
from meshrun.layout.spec import parse_mesh
from meshrun.plan.hardware import choose_gpus, parse_gpus
from meshrun.plan.parse import GpuMemoryWait
from meshrun.plan.plan import LaunchPlan, build_plan
from meshrun.plan.rank_env import LaunchFacts, nic_variables, note_no_nics, rank_environment
from meshrun.supervisor.launch_gpus import GpuWait
from tests.machines import put
from tests.nvml import NO_PERMISSION, FakeNvml, card
from tests.plans import request_of

CARDS = [card("GPU-1b2c-0", 0x1A), card("GPU-1b2d-1", 0xDC), card("GPU-3d4e-2", 3, domain=0x10001)]
ADDRESSES = ("0000:1a:00.0", "0000:dc:00.0", "10001:03:00.0")
SLICED = [card("GPU-aa", 1, migs=["MIG-11", "MIG-12"]), card("GPU-bb", 2, migs=[])]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that installs a driver with some GPUs."""

    def make(cards: Sequence[dict[str, Any] | None] = CARDS) -> FakeNvml:
        nvml = FakeNvml(cards)
        monkeypatch.setattr(ctypes, "CDLL", lambda _: nvml)
        return nvml

    return make


# ---- what is visible ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "addresses"),
    [
        (None, ADDRESSES),
        ("", ()),
        ("2,0", (ADDRESSES[2], ADDRESSES[0])),
        (" 1 ,-1,0", (ADDRESSES[1],)),
        ("0,9,1", (ADDRESSES[0],)),
        ("GPU-3d4e-2,GPU-1b2c", (ADDRESSES[2], ADDRESSES[0])),
        ("GPU-1b", ()),
        ("MIG-1,GPU-3d", ()),
        ("MIG-GPU-3d4e-2/1/0", (ADDRESSES[2],)),
        ("NoDevFiles", ()),
        ("²", ()),
    ],
)
def test_visible_gpus(listed: str | None, addresses: tuple[str, ...], driver: Any) -> None:
    """In the order of CUDA_VISIBLE_DEVICES, up to the first unknown one."""
    nvml = driver()
    env = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}

    found = visible_gpus("cuda", env)[1]

    assert tuple(gpu.address for gpu in found) == addresses
    entries = [entry.strip() for entry in (listed or "0,1,2").split(",")]
    assert [gpu.entry for gpu in found] == entries[: len(found)]
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("present", "listed", "count"),
    [
        (8, "0,1", 2),
        (8, "GPU-1b2c,GPU-3d4e", 2),
        (8, "0,9,2", 1),
        (0, "0,1", 0),
        (8, "MIG-1", 1),
        (8, "NoDevFiles", 0),
    ],
)
def test_without_uuids_names_are_trusted(present: int, listed: str, count: int) -> None:
    """A container without NVML has only device nodes."""
    gpus = [Gpu(entry=str(index), index=index) for index in range(present)]

    assert len(filter_visible(gpus, listed)) == count


def test_gpus_that_do_not_answer_or_are_not_ours(driver: Any) -> None:
    """A device cgroup hides GPUs from CUDA, but NVML counts them; one that is lost has no UUID."""
    driver([card("", 1, code=NO_PERMISSION), card("GPU-bb", 2), card("GPU-cc", 3), None])
    found = visible_gpus("cuda", {})[1]
    listed = visible_gpus("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-d"})[1]
    machine = facts(gpus=tuple(replace(gpu, numa_node=None) for gpu in found))

    assert [(gpu.entry, gpu.label, gpu.uuid) for gpu in found] == [
        ("0", "1", "GPU-bb"),
        ("1", "2", "GPU-cc"),
        ("2", "3", ""),
    ]
    assert [(gpu.entry, gpu.address) for gpu in listed] == [
        ("GPU-c", "0000:03:00.0"),
        ("GPU-d", None),
    ]
    assert choose_gpus(("1",), machine).visible_devices == ("GPU-cc",)
    assert choose_gpus(("GPU-c",), machine).gpus[0].uuid == "GPU-cc"
    with pytest.raises(UsageError, match="--gpus 2: the driver cannot reach this GPU"):
        choose_gpus(("2",), machine)


def test_mig_instances_are_seen_by_name(driver: Any) -> None:
    """As parts of their GPU."""
    driver(SLICED)

    (first,) = visible_gpus("cuda", {"CUDA_VISIBLE_DEVICES": "MIG-12,MIG-13"})[1]

    assert (first.entry, first.uuid, first.index, first.address) == (
        "MIG-12", "MIG-12", 0, "0000:01:00.0",
    )  # fmt: skip
    assert [gpu.mig_uuids for gpu in visible_gpus(None, {})[1]] == [("MIG-11", "MIG-12"), ()]


def test_drivers_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No driver, one that fails, one without these functions, and a lost GPU."""

    def missing(name: str) -> None:
        raise OSError(name)

    lost = FakeNvml([None, card("GPU-1", 1)])
    for library, indices in (
        (missing, [0, 1]),
        (lambda _: SimpleNamespace(nvmlInit_v2=lambda: 9), [0, 1]),
        (lambda _: SimpleNamespace(), [0, 1]),
        (lambda _: lost, [0, 1]),
    ):
        for index in (0, 1):
            put(tmp_path / f"nvidia{index}", "")
        put(tmp_path / "nvidiactl", "")
        monkeypatch.setattr(ctypes, "CDLL", library)
        assert [gpu.index for gpu in visible_gpus("cuda", {}, dev=tmp_path)[1]] == indices
        assert visible_gpus("hip", {}, dev=tmp_path, sysfs=tmp_path)[1] == ()


def kfd(sysfs: Path, nodes: Sequence[tuple[int, int, int]]) -> None:
    """Write AMD's topology: (SIMD units, unique id, bus) of each node; a CPU has no units."""
    for node, (units, unique, bus) in enumerate(nodes):
        text = f"simd_count {units}\nunique_id {unique}\nlocation_id {bus << 8}\ndomain 0"
        put(sysfs / f"class/kfd/kfd/topology/nodes/{node}/properties", text)


@pytest.mark.parametrize(
    ("env", "buses", "entries"),
    [
        ({}, [0x43, 0x44, 0xA3], ["0", "1", "2"]),
        ({"ROCR_VISIBLE_DEVICES": "2,0"}, [0xA3, 0x43], ["0", "1"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000000b1"}, [0x44], ["0"]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, [0xA3], ["1"]),
        ({"HIP_VISIBLE_DEVICES": "2,1", "CUDA_VISIBLE_DEVICES": "0"}, [0xA3, 0x44], ["2", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [0x44], ["1"]),
    ],
)
def test_amd_gpus(
    env: dict[str, str], buses: list[int], entries: list[str], tmp_path: Path
) -> None:
    """ROCr hides GPUs and renumbers the rest; then HIP reads its own variable, or CUDA's."""
    kfd(tmp_path, [(0, 0, 0), (304, 0xA1, 0x43), (304, 0xB1, 0x44), (304, 0xC1, 0xA3)])
    put(tmp_path / "bus/pci/devices/0000:44:00.0/numa_node", "1")

    found = visible_gpus("hip", env, sysfs=tmp_path)[1]
    assert visible_gpus(None, env, sysfs=tmp_path, dev=tmp_path) == ("hip", found)

    assert [gpu.address for gpu in found] == [f"0000:{bus:02x}:00.0" for bus in buses]
    assert [gpu.entry for gpu in found] == entries
    assert [gpu.numa_node for gpu in found] == [1 if bus == 0x44 else None for bus in buses]


def test_intel_gpus(tmp_path: Path) -> None:
    """By Level Zero's mask, in which tiles have a dot; other vendors' cards do not count."""
    for minor, (bus, vendor) in enumerate([(3, "0x8086"), (4, "0x1002"), (5, "0x8086")], 128):
        device = tmp_path / f"devices/pci0000:00/0000:{bus:02x}:00.0"
        put(device / "vendor", vendor)
        (tmp_path / f"class/drm/renderD{minor}").mkdir(parents=True)
        (tmp_path / f"class/drm/renderD{minor}/device").symlink_to(device)

    def seen(mask: str | None) -> list[tuple[str, str | None]]:
        env = {} if mask is None else {"ZE_AFFINITY_MASK": mask}
        return [(gpu.entry, gpu.address) for gpu in visible_gpus("xpu", env, sysfs=tmp_path)[1]]

    assert seen(None) == [("0", "0000:03:00.0"), ("1", "0000:05:00.0")]
    assert seen("1.0,1.1,2") == [("1.0", "0000:05:00.0"), ("1.1", "0000:05:00.0")]


# ---- what is requested -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("0,2-4", ("0", "2", "3", "4")),
        (" 1 , 0", ("1", "0")),
        ("3-3", ("3",)),
        ("0.0,0.1", ("0.0", "0.1")),
        ("GPU-8932f937,GPU-4a1b-c0", ("GPU-8932f937", "GPU-4a1b-c0")),
        ("MIG-1,MIG-GPU-5c/7/0", ("MIG-1", "MIG-GPU-5c/7/0")),
    ],
)
def test_lists_of_gpus_are_parsed(text: str, entries: tuple[str, ...]) -> None:
    """Numbers and ranges, UUIDs, or MIG instances."""
    assert parse_gpus(text, "--gpus") == entries


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an entry is empty"),
        ("0,,1", "an entry is empty"),
        ("0,x", "`x` names no GPU"),
        ("-1", "`-1` names no GPU"),
        ("cuda:0", "`cuda:0` names no GPU"),
        ("all", "`all` names no GPU"),
        ("3-1", "`3-1` is not a range"),
        ("0-99999999", "`0-99999999` is not a range"),
        ("0,1,0", "names 0 more than once"),
        ("0-2,2", "names 2 more than once"),
        ("0,00", "names 0 more than once"),
        ("GPU-1,GPU-1", "names GPU-1 more than once"),
        ("0,GPU-1", "mixes a number (`0`) and a UUID (`GPU-1`)"),
        ("MIG-1,GPU-1", "mixes the name of a MIG instance (`MIG-1`) and a UUID (`GPU-1`)"),
    ],
)
def test_invalid_lists_of_gpus(text: str, message: str) -> None:
    """Each mistake has its own error."""
    with pytest.raises(UsageError) as caught:
        parse_gpus(text, "--gpus")

    assert message in caught.value.message
    assert caught.value.hint


def facts(visible: tuple[str, ...] | None = None, **changes: Any) -> HostFacts:
    """A machine with four GPUs, the second in MIG mode; some may be hidden."""
    present = [
        Gpu(entry="0", index=0, uuid="GPU-a0"),
        Gpu(entry="1", index=1, uuid="GPU-a1", mig_uuids=("MIG-1", "MIG-2", "MIG-3")),
        Gpu(entry="2", index=2, uuid="GPU-b2"),
        Gpu(entry="3", index=3, uuid="GPU-c3"),
    ]
    gpus = filter_visible(present, None if visible is None else ",".join(visible))
    return replace(
        HostFacts(
            hostname="node", usable_cores=16, accelerator="cuda", accelerator_count=len(gpus),
            visible_devices=visible, gpus=gpus,
        ),
        **changes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "visible", "indices", "entries"),
    [
        ("2,0", None, [2, 0], ("2", "0")),
        ("1-2", ("3", "2", "0"), [2, 0], ("2", "0")),
        ("0", ("GPU-c3", "GPU-b2"), [3], ("GPU-c3",)),
        ("GPU-c,GPU-b2", None, [3, 2], ("GPU-c3", "GPU-b2")),
        ("GPU-c", ("2", "3"), [3], ("GPU-c3",)),
        ("MIG-2,MIG-3", None, [1, 1], ("MIG-2", "MIG-3")),
        ("1", ("MIG-1", "MIG-3"), [1], ("MIG-3",)),
        ("MIG-3", ("MIG-1", "MIG-3"), [1], ("MIG-3",)),
        ("MIG-GPU-a1/7/0", None, [1], ("MIG-GPU-a1/7/0",)),
    ],
)
def test_gpus_are_chosen_among_visible_ones(
    asked: str, visible: tuple[str, ...] | None, indices: list[int], entries: tuple[str, ...]
) -> None:
    """Numbers mean what they do in ``cuda:2``; ranks get the variable's own entries."""
    chosen = choose_gpus(parse_gpus(asked, "--gpus"), facts(visible))

    assert [gpu.index for gpu in chosen.gpus] == indices
    assert chosen.visible_devices == entries
    assert chosen.accelerator_count == len(entries)


@pytest.mark.parametrize(
    ("asked", "visible", "message"),
    [
        ("4", None, "--gpus 4: no such GPU: this machine has 4 GPUs"),
        ("2", ("3", "1"), "--gpus 2: no such GPU: CUDA_VISIBLE_DEVICES=3,1 leaves 2 GPUs"),
        ("GPU-a", None, "--gpus GPU-a may mean 2 GPUs: GPU-a0, GPU-a1"),
        ("GPU-d", None, "this machine has 4 GPUs: GPU-a0, GPU-a1, GPU-b2, GPU-c3"),
        ("GPU-a0", ("2", "3"), "CUDA_VISIBLE_DEVICES=2,3 leaves 2 GPUs: GPU-b2, GPU-c3"),
        ("1,2", None, "--gpus 1 is divided into 3 MIG instances"),
        ("GPU-b,GPU-b2", None, "--gpus: `GPU-b` and `GPU-b2` are the same GPU"),
        ("MIG-9", None, "with the MIG instances MIG-1, MIG-2, MIG-3"),
        ("MIG-1", ("2", "3"), "leaves 2 GPUs and MIG is off"),
        ("MIG-1", ("MIG-3",), "leaves 1 GPU with the MIG instances MIG-3"),
    ],
)
def test_gpus_that_are_not_here(asked: str, visible: tuple[str, ...] | None, message: str) -> None:
    """The error says what was requested and what there is, with the numbers."""
    with pytest.raises(UsageError) as caught:
        choose_gpus(parse_gpus(asked, "--gpus"), facts(visible))

    assert message in caught.value.message
    assert caught.value.hint


def test_an_empty_list_hides_all() -> None:
    """And the error shows it."""
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES= leaves no GPU"):
        choose_gpus(("0",), facts((), gpus=()))
    assert listed_devices(("HIP", "CUDA"), {"HIP": "", "CUDA": "1, 2"}) == ("1", "2")
    assert listed_devices(("HIP", "CUDA"), {"HIP": ""}) == ()
    assert listed_devices(("HIP", "CUDA"), {}) is None


def test_a_machine_without_gpus_can_plan_but_not_launch() -> None:
    """A dry run may be meant for another machine."""
    bare = HostFacts(hostname="laptop", usable_cores=4, accelerator=None, accelerator_count=0)

    planned = choose_gpus(("0", "2"), bare, check_host=False)

    assert (planned.accelerator, planned.accelerator_count) == ("cuda", 2)
    with pytest.raises(UsageError, match="this machine has no GPU"):
        choose_gpus(("0", "2"), bare)


def test_numa_nodes_and_links_follow_the_choice() -> None:
    """They are those of the chosen GPUs, in their order."""
    whole = facts(
        topology=Topology(cpus=(), accelerator_nodes=(0, 0, 1, None)),
        links=GpuLinks(pairs=tuple(tuple(f"{a}{b}" for b in range(4)) for a in range(4))),
    )

    chosen = choose_gpus(("3", "0"), whole)

    assert chosen.topology is not None
    assert chosen.topology.accelerator_nodes == (None, 0)
    assert chosen.links == GpuLinks(pairs=(("33", "30"), ("03", "00")))


def test_different_models_are_passed_by_uuid() -> None:
    """CUDA would number the fastest one first."""
    gpus = tuple(replace(gpu, model=f"model {gpu.index == 3}") for gpu in facts().gpus)

    assert choose_gpus(("3", "2"), facts(gpus=gpus)).visible_devices == ("GPU-c3", "GPU-b2")
    listed = facts(("3", "2"))
    listed = replace(listed, gpus=(gpus[3], gpus[2]))
    assert choose_gpus(("1",), listed).visible_devices == ("2",)


@pytest.mark.parametrize(
    ("variables", "asked", "expected"),
    [
        (("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), "GPU-c3,GPU-b2", ("3", "2")),
        (("ZE_AFFINITY_MASK",), "3,2", ("2", "3")),
        (("ZE_AFFINITY_MASK",), "2.1,2.0", ("2.1", "2.0")),
    ],
)
def test_other_vendors(variables: tuple[str, ...], asked: str, expected: tuple[str, ...]) -> None:
    """HIP gets numbers; Level Zero keeps its own order of devices, whatever the mask says."""
    chosen = choose_gpus(parse_gpus(asked, "--gpus"), facts(visibility=variables))

    assert chosen.visible_devices == expected
    unknown = tuple(replace(gpu, uuid="") for gpu in facts().gpus)
    with pytest.raises(UsageError, match="UUIDs of this machine's GPUs are unknown"):
        choose_gpus(("GPU-c3",), facts(visibility=variables, gpus=unknown))


@pytest.mark.parametrize(
    ("build", "env", "variables"),
    [
        ("cuda", {}, ("CUDA_VISIBLE_DEVICES",)),
        ("cuda", {"HIP_VISIBLE_DEVICES": "0"}, ("CUDA_VISIBLE_DEVICES",)),
        (None, {"HIP_VISIBLE_DEVICES": "0"}, ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
        ("hip", {}, ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
        ("xpu", {}, ("ZE_AFFINITY_MASK",)),
    ],
)
def test_each_build_has_its_variable(build: Any, env: dict[str, str], variables: object) -> None:
    """The variable that selects its devices."""
    assert visibility_variables(build, env) == variables


# ---- plans -------------------------------------------------------------------------------------


def plan(mesh: str | None = "dp=2", here: HostFacts | None = None, **changes: Any) -> LaunchPlan:
    request = request_of(
        mesh=parse_mesh(mesh) if mesh else None,
        **{"gpus": ("2", "3"), **changes},
    )
    return build_plan(request, here or facts())


def environment(of: LaunchPlan, rank: int, base: dict[str, str] | None = None) -> dict[str, str]:
    launch = LaunchFacts(run_id="1", master_addr="127.0.0.1", master_port=1, interface="lo")
    return rank_environment(of, of.rank(rank), launch, base or {})


def test_ranks_see_the_chosen_gpus() -> None:
    """All of them, or with virtual local ranks only their own, in their vendor's variable."""
    hip = facts(visibility=("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"))
    xpu = facts(visibility=("ZE_AFFINITY_MASK",), accelerator="xpu")

    assert environment(plan(), 1)["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment(plan(virtual_local_rank=True), 1)["CUDA_VISIBLE_DEVICES"] == "3"
    assert environment(plan(here=hip), 1)["HIP_VISIBLE_DEVICES"] == "2,3"
    assert environment(plan(here=xpu), 1)["ZE_AFFINITY_MASK"] == "2,3"
    assert "CUDA_VISIBLE_DEVICES" not in environment(plan(here=xpu), 1)
    whole = facts(gpus=tuple(replace(gpu, mig_uuids=()) for gpu in facts().gpus))
    assert "CUDA_VISIBLE_DEVICES" not in environment(plan(here=whole, gpus=None), 1)
    assert plan("dp=-1").layout.world_size == 2
    assert plan(None, nproc_per_node="gpu").layout.world_size == 2


@pytest.mark.parametrize(
    ("mesh", "changes", "message"),
    [
        ("dp=3", {}, "3 workers need 3 GPUs, but --gpus 2,3 names 2"),
        ("dp=2", {"device": "cpu"}, "--gpus 2,3: the mesh is on cpu (as requested)"),
        ("dp=2", {"gpus": ("MIG-1", "MIG-3")}, "lists 2 MIG instances for 2 workers"),
        ("dp=2", {"gpus": None}, "GPU 1 is divided into 3 MIG instances, of which CUDA shows"),
        ("dp=2", {"gpus": None, "here": facts(("2", "2"))}, "names 2 more than once, so CUDA"),
        (None, {"gpus": None, "nproc_per_node": "gpu"}, "GPU 1 is divided into 3 MIG instances"),
    ],
)
def test_launches_that_do_not_fit_the_gpus(
    mesh: str | None, changes: dict[str, Any], message: str
) -> None:
    """A mesh never falls back to the CPU silently, and CUDA shows a process one MIG instance."""
    with pytest.raises((UsageError, LayoutError)) as caught:
        plan(mesh, **changes)

    assert message in caught.value.message
    assert caught.value.hint


def test_mig_instances_need_virtual_local_ranks() -> None:
    """Each rank gets its own, or they share a GPU; a single rank needs no such option."""
    migs = plan(gpus=("MIG-1", "MIG-3"), virtual_local_rank=True)

    assert environment(migs, 1)["CUDA_VISIBLE_DEVICES"] == "MIG-3"
    shared = plan(here=facts(("2", "2")), gpus=None, virtual_local_rank=True)
    assert environment(shared, 1)["CUDA_VISIBLE_DEVICES"] == "2"
    assert environment(plan("dp=1", gpus=("MIG-1",)), 0)["CUDA_VISIBLE_DEVICES"] == "MIG-1"


@pytest.mark.parametrize(("visible", "seen"), [(None, "1"), (("5", "7"), "7"), ((), "")])
def test_a_virtual_local_rank_sees_no_gpu_that_is_hidden(
    visible: tuple[str, ...] | None, seen: str
) -> None:
    """An empty CUDA_VISIBLE_DEVICES means no GPU, not all of them."""
    here = facts(visible, accelerator=None, accelerator_count=0)
    virtual = plan(None, here, gpus=None, nproc_per_node=2, virtual_local_rank=True)

    assert environment(virtual, 1)["CUDA_VISIBLE_DEVICES"] == seen


def test_a_torch_without_gpu_support_cannot_use_them() -> None:
    """Although the machine has some; without a mesh, the program may use them."""
    bare = facts(accelerator=None, accelerator_count=0)

    with pytest.raises(UsageError, match="the mesh is on cpu"):
        plan(here=bare)
    assert environment(plan(None, here=bare), 0)["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_a_dry_run_shows_the_gpu_of_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """With number, UUID, NUMA node and network card; those of other nodes are unknown."""
    from meshrun.report.dry_run import print_dry_run, print_rank
    from meshrun.report.plan_json import render_plan_json

    cards = Nics(names=("mlx5_1",), nearness="same switch", ports=("mlx5_1:1",))
    gpus = tuple(replace(gpu, numa_node=1, cards=cards) for gpu in facts().gpus)
    here = plan("dp=4", facts(gpus=gpus), nnodes=2)

    print_dry_run(here)
    print_rank(here, 1)

    shown = capsys.readouterr().out
    assert "   1   cuda:1     3   GPU-c3           1   mlx5_1 (same switch)" in shown
    assert "gpu: 3 GPU-c3, NUMA node 1, nearest network card mlx5_1 (same switch)" in shown
    ranks = json.loads(render_plan_json(here))["ranks"]
    assert [rank["gpu"] and rank["gpu"]["index"] for rank in ranks] == [2, 3, None, None]
    assert ranks[1]["gpu"] == {
        "index": 3, "uuid": "GPU-c3", "model": None, "pci_address": None, "numa_node": 1,
        "nics": ["mlx5_1"], "nic_nearness": "same switch",
        "nic_variables": {"NCCL_IB_HCA": "=mlx5_1:1", "UCX_NET_DEVICES": "mlx5_1:1"},
    }  # fmt: skip


# ---- memory ------------------------------------------------------------------------------------


def test_without_a_driver_there_is_no_wait_for_memory(driver: Any) -> None:
    """Nor for a mesh on the CPU; a note says so."""
    asked = GpuMemoryWait(limit_bytes=1 << 20, timeout_s=9.0)
    on_cpu = plan("dp=1", gpus=None, device="cpu", gpu_memory_wait=asked)
    notes: list[str] = []
    begun: list[str] = []

    for each in (plan("dp=1", gpu_memory_wait=asked), on_cpu):
        driver([card("GPU-b2", 1, used=2 << 20)] if each is on_cpu else [])
        wait = GpuWait(each, Reactor(), notes.append)
        wait.delay(each.used_gpus, 0, partial(begun.append, "now"))

    assert notes == ["--gpu-memory-wait has no effect: NVML reports no GPU of this launch"] * 2
    assert begun == ["now"] * 2


def test_ranks_restart_if_no_process_can_wait_for_memory(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher survives that, and says so."""
    asked = GpuMemoryWait(limit_bytes=1 << 20, timeout_s=9.0)
    driver([card("GPU-b2", 1, used=2 << 20)])
    notes: list[str] = []
    begun: list[str] = []
    here = plan("dp=1", gpus=None, gpu_memory_wait=asked)
    wait = GpuWait(here, Reactor(), notes.append)

    def fork() -> NoReturn:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", fork)
    wait.delay(here.used_gpus, 0, partial(begun.append, "now"))

    assert begun == ["now"]
    assert notes[-1:] == [
        "cannot start a process to wait for GPU memory: Resource temporarily unavailable"
    ]


def test_ranks_of_a_warm_server_belong_to_this_launch(driver: Any) -> None:
    """Their zygote is not a child of the launcher."""
    outside = psutil.Process(os.getppid())
    gpu = Gpu(entry="0", index=0, uuid="GPU-a1")
    driver([card("GPU-a1", 1, used=1 << 30, processes=[[outside.pid, 1 << 30]])])
    nvml = load_nvml()
    assert nvml is not None
    above = [(process.pid, True) for process in outside.parents()[-1:]]  # none, if it is init
    for zygote, is_ours in ((0, False), (outside.pid, True), *above):
        ((holder,),) = (use.holders for use in read_use(nvml, [gpu], roots=[zygote]))
        assert holder.is_ours is is_ours


def test_only_gpus_that_ranks_use_are_waited_for() -> None:
    """If the program chooses, all visible GPUs are."""
    assert [gpu.index for gpu in plan("dp=1", gpus=None).used_gpus] == [0]
    assert [gpu.index for gpu in plan().used_gpus] == [2, 3]
    assert [gpu.index for gpu in plan(None).used_gpus] == [2, 3]
    assert len(plan(None, gpus=None).used_gpus) == 4


# ---- network cards -----------------------------------------------------------------------------

WAYS = {
    "gpu0": "pci0000:00/0000:00:01.0/0000:00:00.0",
    "gpu1": "pci0000:40/0000:40:01.0/0000:01:00.0",
    "gpu2": "pci0000:80/0000:80:01.0/0000:02:00.0",
    "near": "pci0000:00/0000:00:01.0/0000:09:00.0",
    "also": "pci0000:00/0000:00:01.0/0000:0a:00.0",
    "down": "pci0000:00/0000:00:01.0/0000:0b:00.0",
    "root": "pci0000:40/0000:40:03.0/0000:49:00.0",
    "node": "pci0000:90/0000:90:03.0/0000:99:00.0",
    "eth0": "pci0000:90/0000:90:05.0/virtio1",
}


def test_the_nearest_network_cards_are_found(tmp_path: Path) -> None:
    """By the path through PCI and the NUMA node; cards without a link and bridges do not count."""
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    for name, way in WAYS.items():
        device = tmp_path / "devices" / way
        numa = device.parent if name == "eth0" else device
        put(numa / "numa_node", "1" if name in ("gpu2", "node", "eth0") else "0")
        device.mkdir(exist_ok=True)
        if name.startswith("gpu"):
            (tmp_path / "bus/pci/devices" / f"0000:0{name[3]}:00.0").symlink_to(device)
            continue
        kind = tmp_path / "class" / ("net" if name == "eth0" else "infiniband") / name
        put(kind / "ports/1/state", "1: DOWN" if name in ("down", "near") else "4: ACTIVE")
        put(kind / "ports/2/state", "4: ACTIVE" if name == "near" else "1: DOWN")
        (kind / "device").symlink_to(device)
    put(tmp_path / "class/net/docker0/operstate", "up")

    addresses = ("0000:00:00.0", "0000:01:00.0", "0000:02:00.0", None)
    gpus = add_nics([Gpu(entry="", address=at) for at in addresses], sysfs=tmp_path)

    assert [str(gpu.cards) for gpu in gpus] == [
        "also, near (same switch)", "root (same root)", "node (same NUMA node)", "None",
    ]  # fmt: skip
    assert [str(gpu.interfaces) for gpu in gpus[1:3]] == [
        "eth0 (another NUMA node)", "eth0 (same NUMA node)",
    ]  # fmt: skip
    for device in ("gpu0", "eth0"):
        (tmp_path / "devices" / WAYS[device] / "numa_node").write_text("-1\n")
    unknown = add_nics([Gpu(entry="", address=addresses[0])], sysfs=tmp_path)[0]
    assert (unknown.cards, unknown.interfaces) == (gpus[0].cards, None)
    assert gpus[0].cards is not None
    assert gpus[0].cards.ports == ("also:1", "near:2")
    put(tmp_path / "class/net/eth0/operstate", "down")
    assert add_nics([Gpu(entry="", address=addresses[0])], sysfs=tmp_path)[0].interfaces is None


NETWORKS = (("eth0", "10.0.0.0/24"), ("eth1", "10.0.0.0/24"), ("eth2", "10.0.2.0/24"))


@pytest.mark.parametrize(
    ("interface", "near", "found"),
    [
        ("eth0", ("eth1",), {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}),
        ("eth0", ("eth1", "eth0"), {}),
        ("eth0", ("eth2",), {}),
        ("lo", ("eth1",), {}),
        (None, ("eth1",), {}),
    ],
)
def test_an_interface_counts_if_it_reaches_the_other_nodes(
    interface: str | None, near: tuple[str, ...], found: dict[str, str]
) -> None:
    """If it is on the network over which nodes found each other; otherwise the default stays."""
    gpu = Gpu(entry="0", interfaces=Nics(names=near, nearness="same switch"))

    assert nic_variables(gpu, interface, NETWORKS) == found


def test_ranks_use_the_cards_next_to_their_gpus() -> None:
    """Only on request, and never against the user's own variables."""
    gpus = tuple(
        replace(gpu, cards=Nics(names=(f"m{n}",), nearness="same root", ports=(f"m{n}:1",)))
        for n, gpu in enumerate(facts().gpus)
    )
    kept, free = (plan(here=facts(gpus=gpus), nic_affinity=on) for on in (True, False))

    assert environment(kept, 0)["NCCL_IB_HCA"] == "=m2:1"
    assert environment(kept, 1)["UCX_NET_DEVICES"] == "m3:1"
    assert environment(kept, 1)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "NCCL_IB_HCA" not in environment(free, 0)
    assert "NCCL_IB_HCA" not in environment(kept, 0, {"NCCL_IB_HCA": "^m0"})
    assert note_no_nics(kept) == note_no_nics(plan()) == ()
    assert note_no_nics(plan(nic_affinity=True))


def test_networks_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without loopback, link-local addresses and the addresses of hardware."""
    entries = [("127.0.0.1", "255.0.0.0"), ("10.0.0.4", "255.255.0.0"), ("10.0.0.5", "255.255.0.0"),
               ("fe80::1%eth0", "ffff:ffff:ffff:ffff::"), ("fd00::1", "ffff:ffff:ffff:ffff::"),
               ("10.9.9.9", None)]  # fmt: skip
    addresses = [
        SimpleNamespace(
            family=socket.AF_INET6 if ":" in address else socket.AF_INET,
            address=address,
            netmask=mask,
        )
        for address, mask in entries
    ]
    hardware = SimpleNamespace(family=psutil.AF_LINK, address="02:00:00:00:00:01", netmask=None)
    found = {"eth0": [*addresses, hardware]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)

    assert networks_of_interfaces() == (("eth0", "10.0.0.0/16"), ("eth0", "fd00::/64"))
