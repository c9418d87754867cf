"""What imports leave behind in a process, and which import is blamed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshrun.zygote import fork_safety
from meshrun.zygote.fork_safety import (
    ImportWatch,
    nvml_based_cuda_check,
    open_devices,
    other_threads,
)

_NVML = "7f00-7f01 r-xp 00000000 08:01 42 /usr/lib/libnvidia-ml.so.575.57\n"
_AMD = "7f00-7f01 r-xp 00000000 08:01 42 /opt/rocm/lib/libamd_smi.so.25\n"


@pytest.mark.parametrize(
    ("files", "mapped", "found"),
    [
        (["/dev/null", "/dev/pts/0", "socket:[5]", "/home/dev/nvidia0"], "", []),
        (["/dev/nvidiactl", "/dev/nvidia0"], "", ["/dev/nvidia0", "/dev/nvidiactl"]),
        (["/dev/nvidiactl", "/dev/nvidia0"], _NVML, []),
        (["/dev/nvidiactl", "/dev/nvidia-uvm"], _NVML, []),
        (["/dev/nvidiactl", "/dev/nvidia-uvm"], "", ["/dev/nvidia-uvm", "/dev/nvidiactl"]),
        (["/dev/nvidia0"], _AMD, ["/dev/nvidia0"]),
        (["/dev/kfd", "/dev/dri/renderD128"], "", ["/dev/dri/renderD128", "/dev/kfd"]),
        (["/dev/kfd", "/dev/dri/renderD128"], _AMD, ["/dev/kfd"]),
        (["/dev/accel/accel0", "/dev/davinci3"], _NVML, ["/dev/accel/accel0", "/dev/davinci3"]),
    ],
)
def test_open_files_show_which_devices_are_in_use(
    files: list[str], mapped: str, found: list[str], tmp_path: Path
) -> None:
    """A monitoring library keeps some files open, too; that of NVIDIA's driver 580 all of them."""
    (tmp_path / "fd").mkdir()
    for number, path in enumerate(files):
        (tmp_path / "fd" / str(number)).symlink_to(path)
    (tmp_path / "maps").write_text(mapped)

    assert open_devices(tmp_path) == found


def test_a_process_that_shows_no_files_has_none_open(tmp_path: Path) -> None:
    """As an interpreter with capabilities, whose files only root may list."""
    assert open_devices(tmp_path) == []


def test_threads_that_a_fork_may_lack_do_not_count(tmp_path: Path) -> None:
    """A process is shown with its main thread, whose name threads of Python share."""
    names = {"7": "python3", "8": "python3", "9": "cuda00001400006", "10": "jemalloc_bg_thd"}
    for thread, name in names.items():
        (tmp_path / "7/task" / thread).mkdir(parents=True)
        (tmp_path / "7/task" / thread / "comm").write_text(f"{name}\n")

    assert sorted(other_threads(tmp_path / "7")) == ["", "cuda00001400006"]


@pytest.mark.parametrize(("answer", "counted"), [(0, 0), (8, 8), (-1, -1)])
def test_devices_are_counted_in_a_fork(
    answer: int, counted: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NVML leaves a thread in the process that asks it."""
    asked = tmp_path / "asked"

    def ask() -> int:
        with asked.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return answer

    cuda = SimpleNamespace(_device_count_nvml=ask)
    monkeypatch.setitem(fork_safety.sys.modules, "torch.cuda", cuda)
    with nvml_based_cuda_check():
        assert [cuda._device_count_nvml(), cuda._device_count_nvml()] == [counted, counted]
    (process,) = asked.read_text().split()

    assert int(process) != os.getpid()
    assert cuda._device_count_nvml is ask


def test_a_torch_that_counts_devices_differently_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = SimpleNamespace()
    monkeypatch.setitem(fork_safety.sys.modules, "torch.cuda", cuda)
    with nvml_based_cuda_check():
        assert vars(cuda) == {}


def test_imports_without_torch_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may import it later, and counts its devices itself."""
    monkeypatch.delitem(fork_safety.sys.modules, "torch.cuda", raising=False)
    before = [*fork_safety.sys.meta_path]
    with nvml_based_cuda_check():
        assert len(fork_safety.sys.meta_path) == len(before) + 1

    assert fork_safety.sys.meta_path == before


@pytest.mark.parametrize(
    ("threads", "reason"),
    [
        (["", "", "", ""], None),
        (["", "", "..", ".."], "importing `b` started 2 threads"),
        (["", ".", "..", ".."], "importing `a` started 1 thread"),
        (["", ".", ".", ""], None),  # a pool that has ended
        (["", "", "", "."], "an import started 1 thread"),
        (["", "", "po.", "po."], "importing `b` started 3 threads (o, p)"),
        ([*"...."], "a Python startup hook, such as sitecustomize, started 1 thread"),
    ],
)
def test_the_first_import_that_left_threads_is_named(
    threads: list[str], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only threads that still exist at the end count; a dot is one without a name."""
    seen = iter(threads)
    monkeypatch.setattr(
        fork_safety, "other_threads", lambda: [name.strip(".") for name in next(seen)]
    )
    monkeypatch.setattr(fork_safety, "_bad_fork_checks", dict)
    watch = ImportWatch()
    for module in "ab":
        watch.imported(module)

    assert watch.why_unsafe() == reason


@pytest.mark.parametrize(
    ("outside", "reason"),
    [
        ({"_is_in_bad_fork": lambda: False}, None),
        ({}, None),
        (
            {"_is_in_bad_fork": lambda: True},
            "importing `a` or `b` used npu, which torch then refuses in forks",
        ),
        (
            {"_is_in_bad_fork": lambda: os.kill(os.getpid(), signal.SIGKILL)},
            "importing `a` or `b` left a process whose forks are killed by signal 9",
        ),
        (
            {"_is_in_bad_fork": lambda: 1 // 0},
            "importing `a` or `b` left a process in whose forks torch's checks fail",
        ),
    ],
)
def test_each_device_type_of_this_torch_is_checked_in_a_fork(
    outside: dict[str, object], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of other packages; a check that fails or kills the fork counts as unsafe."""
    binding = SimpleNamespace(
        _has_mps=False,
        _mtia_isBuilt=lambda: False,
        _mtia_isInBadFork=lambda: True,
        _cuda_isInBadFork=lambda: False,
        _get_privateuse1_backend_name=lambda: "npu",
    )
    torch = SimpleNamespace(_C=binding, npu=SimpleNamespace(**outside))
    monkeypatch.setitem(fork_safety.sys.modules, "torch", torch)
    monkeypatch.setattr(fork_safety, "_signs", dict)
    watch = ImportWatch()
    for module in ("torch", "torch.distributed.device_mesh", "a", "b"):
        watch.imported(module)

    assert watch.why_unsafe() == reason


@pytest.mark.parametrize("before", [None, "0", "1"])
@pytest.mark.parametrize("within", [None, "0"])
def test_the_nvml_based_check_is_used_only_during_imports(
    before: str | None, within: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that the user has set, or that an import sets, stays."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    monkeypatch.setenv(name, before or "")
    if before is None:
        monkeypatch.delenv(name)
    with nvml_based_cuda_check():
        assert os.environ[name] == (before or "1")
        if within is not None:
            os.environ[name] = within

    assert os.environ.get(name) == (within or before)
