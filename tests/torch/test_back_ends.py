"""--backend: what torch does not have is told before any rank; a package's own is taken."""

from __future__ import annotations

import pytest

from tests.kit import PROGRAMS, run_meshrun
from tests.variations import ordinary

pytestmark = pytest.mark.torch
TWO = ("--mesh", "dp=2", "--device", "cpu")
THIRD = PROGRAMS / "third_party.py"


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["--backend", "foo"], "foo"),
        pytest.param(["--backend", "dp=cpu:gloo,cuda:foo"], "foo", marks=pytest.mark.nightly),
        pytest.param(["--backend", "cpu:mpi"], "mpi", marks=pytest.mark.nightly),
        pytest.param(
            ["--backend", "third", "--start-method", "exec"], "third", marks=pytest.mark.nightly
        ),
    ],
    ids=["no name of torch's", "of another device", "not built in", "exec"],
)
def test_a_back_end_that_torch_lacks_is_told_once(words: list[str], missing: str) -> None:
    """By the launcher, with those there are, and how one of a package's comes to be known."""
    from torch.distributed import is_mpi_available

    if missing == "mpi" and is_mpi_available():
        pytest.skip("this torch has MPI")
    ours = run_meshrun(*TWO, *words, PROGRAMS / "wait.py")

    assert ours.returncode == 2, ours.stderr
    first, *_ = ours.stderr.splitlines()
    assert first.startswith("error: --backend: torch ")
    assert f" has no backend `{missing}`; it has gloo" in first
    assert ours.stderr.count("error:") == ours.stderr.count("hint:") == 1
    assert "--preload MODULE" in ours.stderr
    assert "Traceback" not in ours.stderr


@pytest.mark.parametrize(
    "how",
    ordinary([["--mesh-init", "lazy"], ["--preload", "third_party"]], ["--mesh-init", "lazy"]),
)
def test_a_back_end_of_a_package_is_taken(how: list[str]) -> None:
    """Whether the program registers it before its mesh is built, or a module that ranks share."""
    ours = run_meshrun(*TWO, "--backend", "third", *how, THIRD, env={"PYTHONPATH": str(PROGRAMS)})

    assert ours.returncode == 0, ours.stderr
    assert ours.stdout.count("met through third") == 2


@pytest.mark.nightly
def test_a_back_end_that_is_lacking_where_the_mesh_is_built_late() -> None:
    """There it is the program's call that fails."""
    ours = run_meshrun(
        *TWO, "--backend", "foo", "--mesh-init", "lazy", PROGRAMS / "third_party.py"
    )  # fmt: skip

    assert ours.returncode == 1
    assert "has no backend `foo`; it has gloo, " in ours.stderr.rpartition("error: ")[2]
