"""The end of a process whose mesh was built without a launcher."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.variations import ordinary

_PROGRAM = """
import atexit
import sys
import torch.distributed as dist
from meshrun import init_mesh

atexit.register(lambda: print(dist.is_initialized()))
mesh = init_mesh("dp=1", device="cpu")
dist.barrier()
{end}
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("end", "left"),
    ordinary(
        [("", False), ("dist.destroy_process_group()", False), ("raise ValueError", True)],
        "",
    ),
)
def test_a_group_that_meshrun_created_is_destroyed(end: str, left: bool) -> None:
    """Before exit handlers run; not after a failure, when peers may never join a collective."""
    words = [sys.executable, "-c", _PROGRAM.format(end=end)]
    ours = subprocess.run(words, check=False, capture_output=True, text=True)

    assert ours.stdout == f"{left}\n", ours.stderr
    assert ours.returncode == int(left)
