"""Process groups are destroyed when the program no longer needs them, and without a hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit import PROGRAMS, run_meshrun
from tests.variations import ordinary


@pytest.mark.torch
@pytest.mark.parametrize(
    ("how", "options"),
    ordinary(
        [
            ("return", ()),
            ("return", ("--start-method", "exec")),
            ("return", ("--mesh", "dp=4")),
            ("raise", ()),
            ("keep", ()),
            ("subgroups", ()),
            ("at once", ("--mesh", "2x2", "--names", "a,b")),
            ("at once", ()),
        ],
        ("return", ()),
    ),
)
def test_groups_may_die_in_any_way(how: str, options: tuple[str, ...]) -> None:
    """A model with the last reference to its group, a hundred groups, groups that are not used."""
    ours = run_meshrun("--nproc-per-node", "4", *options, PROGRAMS / "short_groups.py", how)

    assert ours.returncode == 0, ours.stderr
    assert ours.stdout.count("done\n") == 4


_GONE = """
import sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.destroy_process_group()
    time.sleep(3600)
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.torch
def test_a_peer_does_not_wait_for_a_destroyed_group(tmp_path: Path) -> None:
    """The rank that destroyed it continues, and the others get an error."""
    (tmp_path / "gone.py").write_text(_GONE)
    ours = run_meshrun("--nproc-per-node", "2", tmp_path / "gone.py")

    assert ours.returncode == 1
    assert "rank 1 raised RuntimeError" in ours.stderr
