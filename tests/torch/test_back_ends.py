"""--backend: an unknown backend is an error before any rank starts; a package's own works."""

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
    ids=["unknown", "unknown for a device", "not built in", "exec"],
)
def test_a_back_end_that_torch_lacks_is_reported_once(words: list[str], missing: str) -> None:
    """By the launcher, with the backends that exist, and how to register a package's."""
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
def test_a_back_end_of_a_package_is_used(how: list[str]) -> None:
    """Whether the program registers it before its mesh is built, or a preloaded module does."""
    ours = run_meshrun(*TWO, "--backend", "third", *how, THIRD, env={"PYTHONPATH": str(PROGRAMS)})

    assert ours.returncode == 0, ours.stderr
    assert ours.stdout.count("met through third") == 2


@pytest.mark.nightly
def test_torchs_fake_back_end_is_used() -> None:
    """torch lists it from the start, but registers it in a module that has to be imported."""
    ours = run_meshrun(*TWO, "--backend", "fake", PROGRAMS / "echo.py")

    assert ours.returncode == 0, ours.stderr


@pytest.mark.nightly
def test_a_back_end_that_torch_lacks_with_a_lazy_mesh() -> None:
    """The program's call fails."""
    ours = run_meshrun(
        *TWO, "--backend", "foo", "--mesh-init", "lazy", PROGRAMS / "third_party.py"
    )  # fmt: skip

    assert ours.returncode == 1
    assert "has no backend `foo`; it has gloo, " in ours.stderr.rpartition("error: ")[2]
