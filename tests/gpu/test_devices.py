"""Which GPU a rank has: it is set before the program's first line, and no other is touched."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import psutil
import pytest

from tests.gpu.hardware import count_gpus, mig_devices, needs, processes_on, used_bytes, uuid_of
from tests.kit import PROGRAMS, run_meshrun, start_meshrun, wait_until

OURS = PROGRAMS.parent / "gpu/programs"
SEEN = OURS / "seen.py"


@needs()
@pytest.mark.parametrize("method", ["fork", "exec"])
def test_the_device_is_set_before_the_program_runs(method: str) -> None:
    gpus = count_gpus()
    words = ("--mesh", f"dp={gpus}", "--device", "cuda", "--start-method", method)
    ours = run_meshrun(*words, SEEN)

    assert ours.returncode == 0, ours.stderr
    for rank in range(gpus):
        assert f"[dp{rank}] device {rank} of {gpus}" in ours.stdout


@needs()
def test_without_a_mesh_no_gpu_is_touched_before_the_program_does() -> None:
    ours = run_meshrun("--nproc-per-node", str(count_gpus()), SEEN)

    assert ours.returncode == 0, ours.stderr
    assert ours.stdout.count("initialized=False") == count_gpus()


@needs(reads_nvml=True, free=True)
def test_a_rank_has_memory_on_its_own_gpu_alone(tmp_path: Path) -> None:
    """Launcher and zygote have no context, and ranks have none on the first GPU."""
    gpus = count_gpus()
    before = {gpu: processes_on(gpu) for gpu in range(gpus)}
    words = ("--mesh", f"dp={gpus}", "--device", "cuda", OURS / "hold.py", "0.01", tmp_path)
    with start_meshrun(*words, folder=tmp_path) as run:
        run.wait_for("holding", gpus)
        new = {gpu: processes_on(gpu) - before[gpu] for gpu in range(gpus)}
        launcher = psutil.Process(run.process.pid)
        known = {launcher.pid, *(child.pid for child in launcher.children(recursive=True))}
        zygote = run.zygote()
        (tmp_path / "go").touch()
        assert run.wait() == 0, run.stderr

    if not set.union(*new.values()):
        pytest.skip("NVML lists no processes here")
    assert [len(new[gpu]) for gpu in range(gpus)] == [1] * gpus
    assert len(set.union(*new.values())) == gpus
    if set.union(*new.values()) <= known:  # else NVML gives the host's process ids
        assert not {zygote, launcher.pid} & set.union(*new.values())


@needs()
def test_each_rank_sees_its_own_gpu_as_the_first() -> None:
    gpus = count_gpus()
    ours = run_meshrun("--nproc-per-node", str(gpus), "--virtual-local-rank", SEEN)

    assert ours.returncode == 0, ours.stderr
    assert ours.stdout.count("device 0 of 1,") == gpus
    assert ours.stdout.count("LOCAL_RANK=0 ") == gpus
    assert len(set(re.findall(r"device 0 of 1, (\S+)", ours.stdout))) == gpus


@needs(reads_nvml=True, whole=True)
@pytest.mark.parametrize("named", ["index", "uuid", "short uuid"])
def test_the_last_gpu_is_chosen_by_name(named: str) -> None:
    last = count_gpus() - 1
    uuid = uuid_of(last)
    name = {"index": str(last), "uuid": uuid, "short uuid": uuid[:12]}[named]
    ours = run_meshrun(
        "--mesh", "dp=1", "--device", "cuda", SEEN, env={"CUDA_VISIBLE_DEVICES": name}
    )

    assert ours.returncode == 0, ours.stderr
    assert f"device 0 of 1, {uuid.removeprefix('GPU-')}" in ours.stdout


@needs(reads_nvml=True)
def test_a_mig_device_is_chosen_by_name() -> None:
    names = mig_devices(0)
    if not names:
        pytest.skip("needs a GPU in MIG mode; that of GPU 0 is off")
    env = {"CUDA_VISIBLE_DEVICES": names[0]}
    ours = run_meshrun("--mesh", "dp=1", "--device", "cuda", SEEN, env=env)

    assert ours.returncode == 0, ours.stderr
    assert "device 0 of 1," in ours.stdout


@needs(whole=True)
def test_too_few_gpus_start_nothing(tmp_path: Path) -> None:
    gpus = count_gpus()
    touch = tmp_path / "touch.py"
    touch.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    ours = run_meshrun("--mesh", f"dp={gpus + 1}", "--device", "cuda", touch)

    assert ours.returncode not in (0, 1)
    assert f"{gpus + 1} workers need {gpus + 1} cuda devices, but this machine has {gpus}" in (
        ours.stderr
    )
    assert not (tmp_path / "ran").exists()


@needs()
@pytest.mark.parametrize("way", ["script", "preload"])
def test_asking_for_a_gpu_in_an_import_spoils_no_fork(way: str, tmp_path: Path) -> None:
    """``torch.cuda.is_available()`` at import, as in some libraries."""
    (tmp_path / "asks.py").write_text("import torch\nfound = torch.cuda.is_available()\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import asks, torch\nassert asks.found\nprint('sum', torch.ones(3).cuda().sum().item())\n"
    )
    more = ("--preload", "asks") if way == "preload" else ()
    ours = run_meshrun(*more, program, env={"PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"})

    assert ours.returncode == 0, ours.stderr
    assert "new interpreter" not in ours.stderr
    assert "sum 3.0" in ours.stdout


@needs()
def test_an_import_that_uses_a_gpu_has_ranks_start_without_fork(tmp_path: Path) -> None:
    (tmp_path / "uses.py").write_text("import torch\nheld = torch.ones(1).cuda()\n")
    program = tmp_path / "program.py"
    program.write_text("import torch\nprint('sum', torch.ones(3).cuda().sum().item())\n")
    path = f"{tmp_path}:{os.environ['PYTHONPATH']}"
    ours = run_meshrun("--preload", "uses", program, env={"PYTHONPATH": path})

    assert ours.returncode == 0, ours.stderr
    assert "sum 3.0" in ours.stdout
    assert "initialized CUDA" in ours.stderr


@needs(reads_nvml=True)
def test_status_shows_the_memory_of_gpus(tmp_path: Path) -> None:
    words = ("--status", "--status-interval", "0.2", OURS / "hold.py", "0.1", tmp_path)
    with start_meshrun(*words, folder=tmp_path) as run:
        run.wait_for("holding")
        wait_until(lambda: "GPU memory" in run.stderr, lambda: run.stderr)
        (tmp_path / "go").touch()

        assert run.wait() == 0, run.stderr


@needs(reads_nvml=True, free=True)
def test_nothing_is_left_on_a_gpu_when_a_launch_has_ended(tmp_path: Path) -> None:
    before = used_bytes()
    (tmp_path / "go").touch()
    ours = run_meshrun(OURS / "hold.py", "0.5", tmp_path)

    assert ours.returncode == 0, ours.stderr
    wait_until(lambda: used_bytes() < before + 2**28, lambda: f"{used_bytes()} after {before}")


@needs(reads_nvml=True, whole=True)
def test_gpus_are_chosen_and_shown() -> None:
    """The plan names the GPU that the rank then gets, by index and by UUID."""
    last = count_gpus() - 1
    for name in (str(last), uuid_of(last)[:16]):
        words = ("--mesh", "dp=1", "--device", "cuda", "--gpus", name)
        shown = run_meshrun(*words, "--dry-run", "--format", "json", SEEN)
        ours = run_meshrun(*words, SEEN)

        (rank,) = json.loads(shown.stdout)["ranks"]
        assert (rank["gpu"]["index"], rank["gpu"]["uuid"]) == (last, uuid_of(last))
        assert ours.returncode == 0, ours.stderr
        assert f"device 0 of 1, {uuid_of(last).removeprefix('GPU-')}" in ours.stdout


@needs(reads_nvml=True)
def test_gpus_that_are_not_there_start_nothing() -> None:
    for name in (str(count_gpus()), "GPU-00000000-0000", "MIG-00000000-0000"):
        ours = run_meshrun("--gpus", name, SEEN)

        assert (ours.returncode, ours.stdout) == (2, "")
        assert f"--gpus {name}: no such GPU: " in ours.stderr


@needs(reads_nvml=True)
def test_the_health_of_gpus_is_read() -> None:
    """Each finding names a GPU, and a broken GPU gives its exit code."""
    ours = run_meshrun("--nproc-per-node", "gpu", "--check-gpus", "--dry-run", SEEN)

    assert ours.returncode in (0, 71), ours.stderr
    assert re.search(r"meshrun: (GPU \d+: .*; |\d+ GPUs? checked, no problems found)", ours.stderr)
