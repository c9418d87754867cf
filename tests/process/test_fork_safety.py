"""Ranks are forked only if the imports have left nothing that a fork cannot use."""

from pathlib import Path

import pytest

from tests.compiled_driver import CompiledDriver
from tests.kit import FAKES, NEW_INTERPRETERS, PROGRAMS, run_meshrun

_FALLS_BACK = f"meshrun: {NEW_INTERPRETERS}: "
_MAPS_CUDA = "import ctypes, os\ncuda = ctypes.CDLL('libcuda.so.1')\n"
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
_POISONED_TORCH = """
import os, torch
from types import SimpleNamespace
zygote = os.getpid()
torch._C = SimpleNamespace(
    _has_mps=False,
    _mtia_isBuilt=lambda: False,
    _get_privateuse1_backend_name=lambda: "privateuseone",
    _cuda_isInBadFork=lambda: os.getpid() != zygote,
)
"""
"""A CUDA build of torch after it has failed to initialize the driver."""


@pytest.fixture
def imports(tmp_path: Path) -> dict[str, str]:
    """Return variables that put ``tmp_path`` on the path beside the fake torch."""
    return {"PYTHONPATH": f"{FAKES}:{tmp_path}"}


@pytest.mark.parametrize("asked", [None, "0"])
def test_a_driver_that_is_only_mapped_does_not_prevent_forks(
    asked: str | None,
    compiled_driver: CompiledDriver,
    tmp_path: Path,
    fake_torch: Path,
    imports: dict[str, str],
) -> None:
    """Forked ranks can use it; the zygote's setting of the NVML check does not reach them."""
    (tmp_path / "maps.py").write_text(f"{_MAPS_CUDA}seen = os.getenv({_NVML_CHECK!r})\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import ctypes, maps, os\n"
        "in_c = ctypes.CDLL(None).getenv\n"
        "in_c.restype = ctypes.c_char_p\n"
        f"print(maps.seen, os.getenv({_NVML_CHECK!r}), in_c({_NVML_CHECK!r}.encode()),\n"
        "    maps.cuda.cuInit(0))\n"
    )
    env = {**imports, **compiled_driver.env, **({_NVML_CHECK: asked} if asked else {})}
    words = ("--preload", "maps", "--no-prefix", "--nproc-per-node", "2", program)
    ours = run_meshrun(*words, env=env)

    assert (ours.returncode, ours.stderr) == (0, "")
    seen = "0 0 b'0' 0" if asked else "1 None None 0"
    assert ours.stdout.splitlines() == [seen, seen]
    assert len(fake_torch.read_text().splitlines()) == 1
    assert len(compiled_driver.initialized_by()) == 2


def test_a_driver_that_an_import_initialized_is_named(
    compiled_driver: CompiledDriver, tmp_path: Path, fake_torch: Path, imports: dict[str, str]
) -> None:
    """Each rank then gets its own interpreter, where the driver works."""
    (tmp_path / "maps.py").write_text(_MAPS_CUDA)
    (tmp_path / "inits.py").write_text("import maps\nmaps.cuda.cuInit(0)\n")
    program = tmp_path / "program.py"
    program.write_text("import maps\nprint(maps.cuda.cuInit(0))\n")
    words = ("--preload", "maps", "--preload", "inits", "--preload", "json")
    ours = run_meshrun(
        *words,
        "--no-prefix",
        "--nproc-per-node",
        "2",
        program,
        env={**imports, **compiled_driver.env},
    )

    assert ours.returncode == 0, ours.stderr
    assert ours.stderr == f"{_FALLS_BACK}importing `inits` initialized CUDA\n"
    assert ours.stdout == "0\n0\n"
    assert len(compiled_driver.initialized_by()) == 3


def test_whether_torch_refuses_a_device_in_forks_is_asked_in_a_fork(
    tmp_path: Path, fake_torch: Path, imports: dict[str, str]
) -> None:
    """Nothing else in the process shows it; the module that may have caused it is named."""
    (tmp_path / "asks.py").write_text(_POISONED_TORCH)
    ours = run_meshrun("--preload", "asks", PROGRAMS / "echo.py", env=imports)

    assert ours.returncode == 0, ours.stderr
    why = "importing `asks` used cuda, which torch then refuses in forks"
    assert ours.stderr.splitlines()[0] == f"{_FALLS_BACK}{why}"
    assert ours.stdout == "[rank 0] out 0\n"
