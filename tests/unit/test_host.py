"""Facts about this machine, and folders, sockets and threads on it."""

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from meshrun.errors import HostError, UsageError
from meshrun.host.cores import count_usable_cores
from meshrun.host.detect_host import detect_host
from meshrun.host.inotify import WriteNotices
from meshrun.host.network import interface_variables, listen_on
from meshrun.host.process_state import is_stopped, read_status, started_at, wait_until_stopped
from meshrun.host.sysfs import cgroup_folders
from meshrun.plan.parse import parse_streams
from meshrun.plan.request import LogRequest
from meshrun.supervisor.run_folder import RunFolder
from meshrun.worker import late_variables


def test_the_affinity_mask_limits_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3})

    assert count_usable_cores() == 1


def test_without_cgroups_only_the_affinity_mask_limits_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on macOS, or if /proc is not mounted."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 5})
    monkeypatch.setattr("meshrun.host.cores.cgroup_folders", lambda *_: iter(()))

    assert count_usable_cores() == 2


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "250000 100000"}, 3),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}, 1),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_a_quota_of_a_cgroup_limits_the_cores(
    files: dict[str, str], cores: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Version 2 or 1, whose controllers may share a folder."""
    (proc := tmp_path / "proc/self").mkdir(parents=True)
    is_v1 = "cpu.max" not in files
    (proc / "cgroup").write_text("4:cpu,cpuacct:/job/step\n0::/\n" if is_v1 else "0::/job/step\n")
    (job := tmp_path / "sys/fs/cgroup" / ("cpu/job" if is_v1 else "job")).mkdir(parents=True)
    for name, text in files.items():
        (job / name).write_text(text)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(
        "meshrun.host.cores.cgroup_folders",
        lambda controller="": cgroup_folders(controller, tmp_path / "proc", tmp_path / "sys"),
    )

    assert count_usable_cores() == cores


def test_the_accelerator_of_torch_is_read_without_importing_it() -> None:
    """From the installed build."""
    assert detect_host(with_gpus=False).accelerator in (None, "cuda", "xpu")


def test_the_store_listens_on_loopback_alone() -> None:
    """Two launches never collide, and no one outside can connect."""
    with listen_on("127.0.0.1", 0) as one, listen_on("127.0.0.1", 0) as other:
        assert one.getsockname()[0] == other.getsockname()[0] == "127.0.0.1"
        assert one.getsockname()[1] != other.getsockname()[1]


def test_private_folders_are_private(tmp_path: Path) -> None:
    """Other users cannot read them."""
    folder = RunFolder(LogRequest(log_dir=str(tmp_path / "new")), "a/b")
    folder.make(0, [0, 1])

    (run,) = (tmp_path / "new").iterdir()
    found = sorted(run.rglob("*"))
    assert run.name.startswith("a_b_")
    assert [path.name for path in found] == ["attempt_0", "0", "1"]
    assert {path.stat().st_mode & 0o777 for path in [run, *found]} == {0o700}


@pytest.mark.parametrize("place", ["folder.Folder.make", "run_folder.make_folder"])
def test_a_full_disk_costs_only_the_error_files(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without logs, ranks start, and start again; with logs, that is an error."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    room = "host" if place.startswith("folder") else "supervisor"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = RunFolder(LogRequest(), "id")
    with monkeypatch.context() as full:
        full.setattr(f"meshrun.{room}.{place}", refuse)
        folder.make(0, {0: {}})
        assert folder.files(0, 0).error_file == ""
        with pytest.raises(HostError, match="No space left"):
            RunFolder(LogRequest(tee=parse_streams("3", "--tee")), "id").make(0, {0: {}})
    folder.make(1, {0: {}})

    assert folder.files(1, 0).error_file.endswith("attempt_1/0/error.json")


@pytest.mark.parametrize("streams", ["0", "3"])
def test_a_temporary_folder_is_locked(streams: str) -> None:
    """So that systemd-tmpfiles keeps it, with logs or without."""
    folder = RunFolder(LogRequest(tee=parse_streams(streams, "--tee")), "id")
    folder.make(0, {0: {}})
    other = os.open(folder.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder.close(went_well=True)
    os.close(other)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    """The error names the path and says what to use instead."""
    (tmp_path / "file").write_text("")

    with pytest.raises(UsageError, match="is a file") as caught:
        RunFolder(LogRequest(log_dir=str(tmp_path / "file")), "id")
    assert caught.value.hint == "use a folder"
    with pytest.raises(UsageError, match=r"cannot write .*: Not a directory"):
        RunFolder(LogRequest(log_dir=str(tmp_path / "file" / "new")), "id")


@pytest.mark.parametrize(
    ("log_dir", "run_id", "hint"),
    [
        ("logs", "7" * 300, "use a shorter --log-dir or --rdzv-id"),
        ("l" * 300, "7", "a shorter"),
        ("l/" * 3000, "7", "a shorter"),
    ],
)
def test_a_folder_whose_name_is_too_long(
    log_dir: str, run_id: str, hint: str, tmp_path: Path
) -> None:
    """The error is not that the folder is not writable."""
    with pytest.raises(UsageError, match="File name too long") as caught:
        RunFolder(LogRequest(log_dir=str(tmp_path / log_dir)), run_id)

    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("release", ["4.4.0", "4.19.0-gvisor"])
def test_in_gvisor_no_interface_is_named_to_gloo(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gVisor lists an interface's addresses in any order, and gloo takes the first."""
    real = os.uname()
    version = "#1 SMP Sun Jan 10 15:06:54 PST 2016"
    assert interface_variables("lo") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}

    fields = (real.sysname, real.nodename, release, version, real.machine)
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(fields))

    assert interface_variables("lo") == {}
    assert interface_variables("eth0") == {}


def test_ranks_start_without_the_package_that_sets_the_threads_of_blas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As from a bare checkout, in an environment made for something else."""
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    monkeypatch.setitem(sys.modules, "numpy", ModuleType("numpy"))
    monkeypatch.setattr(late_variables, "_have", {"torch": 7, "blas": 1})

    late_variables.raise_thread_counts({"OMP_NUM_THREADS": "7"})


def test_a_process_that_is_being_stopped_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that has exited is not."""
    monkeypatch.setattr("meshrun.host.process_state._STOPS_IN_S", 60.0)
    with subprocess.Popen(["sleep", "1000"]) as process:
        with subprocess.Popen(["sh", "-c", f"kill -STOP {process.pid}"]):
            wait_until_stopped([process.pid])

            assert is_stopped(process.pid)
        process.kill()
    wait_until_stopped([process.pid])


def test_a_process_may_have_a_name_that_is_cut_within_a_letter() -> None:
    """The kernel keeps 15 bytes of a name, whatever they are."""
    code = "open('/proc/self/comm', 'w').write('é' * 8); print(flush=True); input()"
    words = [sys.executable, "-X", "utf8", "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()

        assert started_at(process.pid) is not None
        assert read_status(f"/proc/{process.pid}/status")["Pid"] == str(process.pid)
        process.communicate(b"\n")


@pytest.mark.skipif(sys.platform != "linux", reason="needs inotify")
def test_a_notice_that_is_withdrawn_leaves_nothing_in_the_kernel(tmp_path: Path) -> None:
    """A launch with many restarts would reach the limit, also for the user's other programs."""
    notices: WriteNotices[str] = WriteNotices()
    with open(tmp_path / "log", "w") as file:
        assert notices.arm(file.fileno(), "log")
        info = Path(f"/proc/self/fdinfo/{notices.fileno()}")
        assert "inotify" in info.read_text()
        notices.disarm("log")

        assert "inotify" not in info.read_text()
        print("a line", file=file, flush=True)
        assert notices.written() == []
    notices.close()
