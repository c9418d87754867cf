"""``--check`` with real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit import run_meshrun

pytestmark = pytest.mark.torch
MESH = ("--check", "--mesh", "dp=2", "--device", "cpu")


def test_what_is_measured(tmp_path: Path) -> None:
    """Every operation on every dim, links, paths; requirements set the exit code."""
    no_folder = tmp_path / "none"
    paths = ("--check-path", tmp_path, "--check-path", no_folder)
    done = run_meshrun(
        *MESH,
        "--require",
        "dp>=900GB/s",
        *paths,
        "--format",
        "json",
        "quick",
    )
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert {(row["dim"], row["op"]) for row in told["dims"]} == {
        ("dp", op) for op in ("all_reduce", "all_gather", "all_to_all")
    }
    assert {row["bytes"] for row in told["dims"]} == {1 << 10, 1 << 20, 1 << 24}
    assert [rank["exchanges"][0]["peer"] for rank in told["ranks"]] == [1, 0]
    assert all(rank["gflops"] > 0 for rank in told["ranks"])
    texts = [finding["text"] for finding in told["findings"]]
    assert texts[0].startswith("dp>=900GB/s is not met: the slowest group of dp has ")
    assert any(text.startswith(f"`{no_folder}` on ") for text in texts)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((*MESH, "train.py"), "--check runs no program, found `train.py`"),
        (("--check", "--nproc-per-node", "2"), "--check requires --mesh"),
        ((*MESH, "--format", "svg"), "--check has no picture"),
        ((*MESH, "--require", "tp"), "`tp` is no requirement"),
        ((*MESH, "--require", "tp>=1GB/s", "quick"), "the mesh has no dim `tp`"),
    ],
)
def test_what_cannot_be_checked(words: tuple[str, ...], says: str) -> None:
    done = run_meshrun(*words)
    assert done.returncode == 2
    assert says in done.stderr
    assert "rank" not in done.stderr  # nothing was started
