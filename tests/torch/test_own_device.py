"""The device of a rank if a scheduler shows each rank its own."""

from __future__ import annotations

import pytest

from meshrun.mesh.current import _device_type

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("visible", "on_node", "chosen"),
    [(2, None, "cuda"), (1, None, "cpu"), (1, "2", "cuda"), (1, "1", "cpu"), (0, "2", "cpu")],
)
def test_each_rank_has_an_accelerator(
    monkeypatch: pytest.MonkeyPatch, visible: int, on_node: str | None, chosen: str
) -> None:
    """If it sees all of the node's, or one of as many as there are ranks; otherwise the CPU."""
    import torch

    device = torch.device("cuda") if visible else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: visible)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    if on_node:
        monkeypatch.setenv("SLURM_GPUS_ON_NODE", on_node)

    assert _device_type(None) == chosen
