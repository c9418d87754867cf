"""With torch built for CUDA, imports do not initialize the driver, or ranks are not forked."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.compiled_driver import CompiledDriver
from tests.kit import NEW_INTERPRETERS, ROOT

_PYTHON = os.environ.get("MESHRUN_CUDA_PYTHON")
_FALLS_BACK = f"meshrun: {NEW_INTERPRETERS}: "
pytestmark = [
    pytest.mark.integrations,
    pytest.mark.torch,
    pytest.mark.nightly,
    pytest.mark.skipif(
        _PYTHON is None, reason="MESHRUN_CUDA_PYTHON names no interpreter with torch for CUDA"
    ),
]
_MODULES = [
    *("torch", "torch._dynamo", "torch._inductor", "torch.optim", "torch.distributed.fsdp"),
    *("torch.distributed.tensor.parallel", "torch.distributed.checkpoint", "triton.language"),
    *("transformers.models.llama.modeling_llama", "lightning", "accelerate", "deepspeed"),
    *("torchmetrics", "pynvml"),
]


def launch(
    compiled_driver: CompiledDriver, folder: Path, module: str
) -> subprocess.CompletedProcess[str]:
    """Launch a rank with the other interpreter, which preloads a module; return the result."""
    program = folder / "program.py"
    program.write_text("import torch\nprint('bad fork', torch.cuda._is_in_bad_fork())\n")
    path = os.pathsep.join([str(ROOT), str(folder)])
    assert _PYTHON is not None
    return subprocess.run(
        [_PYTHON, "-m", "meshrun", "--preload", module, program],
        env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", **compiled_driver.env},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("module", _MODULES)
def test_importing_a_library_leaves_the_driver_alone(
    module: str, compiled_driver: CompiledDriver, tmp_path: Path
) -> None:
    """NVML answers its questions about devices."""
    ours = launch(compiled_driver, tmp_path, module)
    if f"--preload {module}: no module named" in ours.stderr:
        pytest.skip(f"{_PYTHON} has no {module}")

    assert ours.stdout == "[rank 0] bad fork False\n", ours.stderr
    assert _FALLS_BACK not in ours.stderr
    assert compiled_driver.initialized_by() == []


def test_is_available_at_import_sees_the_device(
    compiled_driver: CompiledDriver, tmp_path: Path
) -> None:
    """Without the driver, so ranks can still be forked."""
    (tmp_path / "asks.py").write_text(
        "import torch\nassert torch.cuda.is_available() and torch.cuda.device_count() == 1\n"
    )
    ours = launch(compiled_driver, tmp_path, "asks")

    assert ours.stdout == "[rank 0] bad fork False\n", ours.stderr
    assert _FALLS_BACK not in ours.stderr
    assert compiled_driver.initialized_by() == []


@pytest.mark.parametrize("call", ["torch.cuda.init()", "torch.zeros(1).cuda()"])
def test_an_import_that_uses_the_device_is_named(
    call: str, compiled_driver: CompiledDriver, tmp_path: Path
) -> None:
    """Its rank is a new interpreter, which can use the device."""
    text = f"import contextlib, torch\nwith contextlib.suppress(RuntimeError):\n    {call}\n"
    (tmp_path / "uses.py").write_text(text)
    ours = launch(compiled_driver, tmp_path, "uses")

    assert ours.stdout == "[rank 0] bad fork False\n", ours.stderr
    assert f"{_FALLS_BACK}importing `uses` initialized CUDA\n" in ours.stderr
    assert len(compiled_driver.initialized_by()) == 1


def test_without_nvml_and_driver_torch_is_asked_in_a_fork(
    compiled_driver: CompiledDriver, tmp_path: Path
) -> None:
    """``is_available()`` then makes torch refuse devices in forks, so the rank is no fork."""
    for library in compiled_driver.folder.iterdir():
        library.unlink()
    (tmp_path / "asks.py").write_text("import torch\nassert not torch.cuda.is_available()\n")
    ours = launch(compiled_driver, tmp_path, "asks")

    assert ours.stdout == "[rank 0] bad fork False\n", ours.stderr
    assert f"{_FALLS_BACK}importing `asks` used cuda, which torch" in ours.stderr
