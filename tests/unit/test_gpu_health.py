"""The health of GPUs, from the driver and the kernel's log."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from meshrun.errors import HostError, UsageError
from meshrun.host.gpu_state import Xid, XidWatch, read_xids
from meshrun.host.gpus import visible_gpus
from meshrun.host.machine import HostFacts
from meshrun.host.nvml import load_nvml
from meshrun.layout.spec import parse_mesh
from meshrun.plan.plan import LaunchPlan, build_plan
from meshrun.protocol.rank_end import RankRaised
from meshrun.rendezvous.expected_nodes import check_settings
from meshrun.supervisor import launch_gpus
from meshrun.supervisor.launch_gpus import GpuErrors, examine_gpus
from meshrun.supervisor.node_link import describe_node
from tests.nvml import NOT_SUPPORTED, FakeNvml, card
from tests.plans import request_of

WELL = {
    "nvmlDeviceGetTotalEccErrors 1 0": 0,
    "nvmlDeviceGetRemappedRows": [0, 0, 0, 0],
    "nvmlDeviceGetCurrentClocksEventReasons": 0x1,
    "nvmlDeviceGetPowerManagementLimit": 700_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
    "links": ["switch"] * 18,
}
"""An idle H100 as NVML describes it."""
LOG = """6,339,5140900,-;nvidia: loading out-of-tree module taints kernel.
4,812,69231,-;NVRM: Xid (PCI:0000:02:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off
4,813,69232,-;NVRM: Xid (PCI:0000:02:00): 79, pid=71, name=python, GPU has fallen off the bus.
 SUBSYSTEM=pci
4,900,99231,-;NVRM: Xid (PCI:0000:01:00): 13, pid=4711, name=python, Graphics SM Warp Exception
4,900,99231,-;NVRM: Xid (PCI:0000:01:00): 13, pid=4711, name=python, Graphics Exception: ESR 0x5=0x1
4,901,99232,-;NVRM: Xid (0000:99:00): 48
6,902,99233,-;Memory cgroup stats for /user/;NVRM: Xid (PCI:0000:02:00): 48, chosen by a user
"""


def launch(monkeypatch: pytest.MonkeyPatch, cards: list[Any]) -> LaunchPlan:
    """Plan a launch with a rank on each GPU."""
    monkeypatch.setattr(ctypes, "CDLL", lambda _: FakeNvml(cards))
    gpus = visible_gpus("cuda", {})[1]
    facts = HostFacts(
        hostname="node", usable_cores=8, accelerator="cuda", accelerator_count=len(gpus), gpus=gpus
    )
    return build_plan(request_of(mesh=parse_mesh("dp=-1")), facts)


def examine(
    monkeypatch: pytest.MonkeyPatch, log: list[Xid] | None, *cards: dict[str, Any] | None
) -> tuple[list[str], HostError | None]:
    """Return the findings for a launch with a rank on each of these GPUs, and its error."""
    plan = launch(monkeypatch, list(cards))
    monkeypatch.setattr(launch_gpus, "read_xids", lambda: log)
    notes: list[str] = []
    try:
        examine_gpus(plan, notes.append)
    except HostError as error:
        return notes, error
    return notes, None


def test_healthy_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Including older models that report nothing, and cards whose links were never connected."""
    unlinked = {**WELL, "links": [None] * 18}
    cards = card("GPU-0", 1, **WELL), card("GPU-1", 2), card("GPU-2", 3, **unlinked)

    assert examine(monkeypatch, [], *cards) == (["3 GPUs checked, no problems found"], None)


@pytest.mark.parametrize(
    ("answers", "problem", "advice", "is_severe"),
    [
        ({"nvmlDeviceGetTotalEccErrors 1 0": 3}, "3 uncorrected memory errors", "reset", True),
        ({"nvmlDeviceGetRemappedRows": [0, 1, 1, 0]}, "will be remapped", "--gpu-reset -i 1", True),
        ({"nvmlDeviceGetRetiredPagesPendingStatus": 1}, "will be remapped", "reset", True),
        ({"nvmlDeviceGetRemappedRows": [0, 1, 0, 1]}, "could not be remapped", "replaced", True),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x44}, "too hot", "PERFORMANCE", False),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x80}, "power supply", "PERFORMANCE", False),
        (
            {"nvmlDeviceGetPowerManagementLimit": 450_500},
            "limit of 450.5 W is below the default of 700 W",
            "-i 1 -pl 700",
            False,
        ),
        ({"links": ["switch"] * 16 + [None] * 2}, "2 of 18 NVLinks are down", "nvlink -s", False),
        ({"processes": [[1, 3 << 30]]}, "pid 1 (", "end them", False),
    ],
)
def test_what_is_wrong_with_a_gpu(
    answers: dict[str, Any],
    problem: str,
    advice: str,
    is_severe: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line with the GPU's number and what to do; a severe problem ends the launch."""
    well, ill = card("GPU-0", 1, **WELL), card("GPU-1", 2, **{**WELL, **answers})

    (line,), error = examine(monkeypatch, [], well, ill)

    assert line.startswith("GPU 1: ")
    assert problem in line
    assert advice in line.rpartition(";")[2]
    assert (error is not None) == is_severe
    if error is not None:
        assert error.message == "--check-gpus: 1 of 2 GPUs failed the check: 1"
        assert (error.exit_code, "--gpus" in str(error.hint)) == (71, True)


def test_a_throttled_gpu_of_an_older_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the same number under another name."""
    answers = {"nvmlDeviceGetCurrentClocksThrottleReasons": 0x20}

    (line,), _ = examine(monkeypatch, [], card("GPU-0", 1, **answers))

    assert line.startswith("GPU 0: it is too hot, and the driver has slowed it down")


def test_a_gpu_without_an_address_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """In some sandboxes, the driver reports no address."""
    monkeypatch.setattr(FakeNvml, "_nvmlDeviceGetPciInfo_v3", lambda *_: NOT_SUPPORTED)

    (line,), error = examine(monkeypatch, [], card("GPU-0", 1, **WELL))

    assert line == "1 GPU checked, no problems found"
    assert error is None


def test_an_instance_without_an_address_is_a_part_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """That GPU is found by the instance's UUID."""
    driver = FakeNvml([card("GPU-0", 1), card("GPU-1", 2, migs=["MIG-10", "MIG-11"])])
    monkeypatch.setattr(FakeNvml, "_nvmlDeviceGetPciInfo_v3", lambda *_: NOT_SUPPORTED)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    (instance,) = visible_gpus("cuda", {"CUDA_VISIBLE_DEVICES": "MIG-11"})[1]
    nvml = load_nvml()
    assert nvml is not None

    assert (instance.uuid, instance.address) == ("MIG-11", None)
    found, expected = nvml.whole_gpu(instance), nvml.gpu_of("GPU-1")
    assert found is not None
    assert expected is not None
    assert found.value == expected.value


def test_gpus_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost GPU, a driver that fails, and a container without its library."""
    (line,), error = examine(monkeypatch, [], card("GPU-0", 1, **WELL), None)
    assert line.startswith("GPU 1: the driver cannot reach it")
    assert error is not None
    plan = launch(monkeypatch, [card("GPU-0", 1)])

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(nvmlInit_v2=lambda: 18))
    with pytest.raises(HostError, match="library and its kernel module have different versions"):
        examine_gpus(plan, print)

    idle = replace(plan, host=replace(plan.host, gpus=()))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(nvmlInit_v2=lambda: 9))
    with pytest.raises(HostError, match="its kernel module is not loaded"):
        examine_gpus(idle, print)  # it may be idle because no GPU was found

    def missing(name: str) -> None:
        raise OSError(name)

    notes: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", missing)
    examine_gpus(plan, notes.append)
    examine_gpus(idle, notes.append)
    assert notes == [
        "--check-gpus: libnvidia-ml.so.1 is not installed; no GPU was checked",
        "--check-gpus: this launch uses no GPU of this machine",
    ]


def test_nodes_with_different_drivers_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --check-gpus."""
    nodes = []
    for driver in ("570.124.06", "550.90.07"):
        plan = launch(monkeypatch, [card("GPU-0", 1)])
        monkeypatch.setattr(FakeNvml, "driver", driver, raising=False)
        checked = replace(plan, request=replace(plan.request, check_gpus=True))
        nodes.append([describe_node(each, b"") for each in (plan, checked)])
    (plain, first), (other, second) = nodes

    check_settings(plain, other)
    with pytest.raises(UsageError, match=r"driver is 570\.124\.06 .* 550\.90\.07"):
        check_settings(second, first)


# ---- the kernel's log --------------------------------------------------------------------------


def test_xids_are_read(tmp_path: Path) -> None:
    """From the records of /dev/kmsg, without the process."""
    (tmp_path / "kmsg").write_text(LOG)

    assert read_xids(tmp_path / "kmsg") == [
        Xid("0000:02:00", 79, "GPU has fallen off"),
        Xid("0000:02:00", 79, "GPU has fallen off the bus."),
        Xid("0000:01:00", 13, "Graphics SM Warp Exception"),
        Xid("0000:01:00", 13, "Graphics Exception: ESR 0x5=0x1"),
        Xid("0000:99:00", 48, ""),
    ]


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 'NVRM: Xid (PCI:0000:02:00): 79, pid=1, name=a, b'", [Xid("0000:02:00", 79, "b")]),
        (
            "echo 'NVRM: Xid (PCI:0000:02:00): 31, pid=1, name=a, Ch 00000008, intr 00000000. MMU'",
            [Xid("0000:02:00", 31, "MMU")],
        ),
        (
            "echo 'NVRM: Xid (PCI:0000:02:00): 43, pid=1, name=a, channel 0x00000008'",
            [Xid("0000:02:00", 43, "")],
        ),
        ("echo 'usb 1-1: new device'", []),
        (r"printf 'oom in /a\rNVRM: Xid (PCI:0000:02:00): 79, chosen by a user\n'", []),
        ("exit 0", None),
        ("echo no access; exit 1", None),
    ],
)
def test_the_journal_is_read_if_the_log_cannot_be(
    script: str, found: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its groups may read it; for others it is empty, which does not mean that all is well."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "journalctl").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "journalctl").chmod(0o755)

    assert read_xids(tmp_path / "kmsg") == found


def test_xids_of_the_gpus_of_a_launch_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their number and what to do, but not those of other GPUs; so is an unreadable log."""
    log = [
        Xid("0000:02:00", 79, "off"),
        Xid("0000:02:00", 79, "off the bus"),
        Xid("0000:99:00", 48, ""),
        Xid("0000:01:00", 13, ""),
    ]
    cards = card("GPU-0", 1, **WELL), card("GPU-1", 2, **WELL)

    assert examine(monkeypatch, log, *cards) == (
        [
            "GPU 0: XID 13, 1 time in the kernel log since boot; a program can cause this",
            "GPU 1: XID 79 (off the bus), 2 times in the kernel log since boot;"
            " reset it with `nvidia-smi --gpu-reset -i 1`, or reboot the machine",
        ],
        None,
    )
    (unread, well), _ = examine(monkeypatch, None, *cards)
    assert "no permission to read the kernel log" in unread
    assert well == "2 GPUs checked, no problems found"


def test_xids_since_the_start_explain_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those of the rank's own GPU, the first of each number, if they may be related to it."""
    log = tmp_path / "kmsg"
    log.write_text("4,1,1,-;NVRM: Xid (PCI:0000:01:00): 63, old\n")
    plan = launch(monkeypatch, [card("GPU-0", 1), card("GPU-1", 2)])
    errors = GpuErrors(plan, log)
    with log.open("a") as file:
        file.write(LOG)

    def why(rank: int, message: str = "", *, asked_to_end: bool = False) -> str | None:
        raised = RankRaised(
            rank=rank, kind="RuntimeError", message=message, traceback="", at_ns=1, shown=True
        )
        failed: Any = SimpleNamespace(
            rank=rank, raised=raised if message else None, asked_to_end=asked_to_end
        )
        return errors.why(failed, plan)

    assert why(0, "CUDA error: launch failure") == "XID 13 (Graphics SM Warp Exception) on GPU 0"
    assert why(1) == "XID 79 (GPU has fallen off) on GPU 1"
    assert why(1, "no such key") is None
    assert why(1, asked_to_end=True) is None
    errors.close()
    assert XidWatch(tmp_path / "missing").read() == []
