"""--submit slurm on a real Slurm: jobs that run, are preempted, cancelled, or refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engines.slurm import Slurm
from tests.kit import PROGRAMS, command, wait_until

pytestmark = pytest.mark.torch
NODES = PROGRAMS / "nodes.py"
REQUEUED = PROGRAMS / "requeued.py"


def submit(slurm: Slurm, folder: Path, *args: str | Path) -> tuple[str, Path]:
    """Hand a job in; return its number and the file of its output."""
    sent = slurm.run(command("--submit", "slurm", *args), cwd=folder)
    assert sent.returncode == 0, sent.stderr
    job = sent.stdout.strip()
    output = Path(sent.stderr.strip().rpartition("output: ")[2])
    assert output == folder / f"{Path(str(args[-1])).stem}-{job}.out"
    return job, output


def wait_for(output: Path, text: str, count: int = 1) -> None:
    """Wait until the output of a job has ``text`` so many times."""

    def read() -> str:
        return output.read_text() if output.exists() else ""

    wait_until(lambda: read().count(text) >= count, lambda: f"{count} x {text!r} in {read()}")


def test_a_job_runs_on_its_nodes(slurm: Slurm, tmp_path: Path) -> None:
    """With what is awkward in a script in the folder's name."""
    folder = tmp_path / "it's a #1 $folder"
    folder.mkdir()
    job, output = submit(
        slurm, folder, "--nnodes", "2", "--mesh", "dp=2,tp=2", "--no-prefix", NODES
    )
    slurm.wait_gone(job)

    said = [line for line in output.read_text().splitlines() if line.startswith("rank")]
    assert sorted(re.sub(r" on sl\d", "", line) for line in said) == [
        "rank 0 of 4: dp 0 tp 0, sum 6",
        "rank 1 of 4: dp 0 tp 1, sum 6",
        "rank 2 of 4: dp 1 tp 0, sum 6",
        "rank 3 of 4: dp 1 tp 1, sum 6",
    ], output.read_text()


@pytest.mark.slow
def test_a_preempted_job_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    """Its ranks take SIGTERM well, so it is requeued and runs again, with another secret."""
    job, output = submit(slurm, tmp_path, "--nnodes", "2", "--nproc-per-node", "1", REQUEUED)
    wait_for(output, "trains in run 0", 2)
    slurm.scancel("--signal=TERM", job)  # as Slurm does before the time limit
    wait_for(output, "trains in run 1", 2)
    slurm.wait_gone(job)

    text = output.read_text()
    secrets = set(re.findall(r"in run (\d) with secret (\w{8})", text))
    assert text.count("saved in run 0") == 2, text
    assert len(secrets) == len({secret for _, secret in secrets}) == 2, text


def test_a_cancelled_job_does_not_go_on(slurm: Slurm, tmp_path: Path) -> None:
    """Its ranks take SIGTERM well too, and it is still not requeued; nothing is left."""
    job, output = submit(slurm, tmp_path, "--nnodes", "2", "--nproc-per-node", "1", REQUEUED)
    wait_for(output, "trains in run 0", 2)
    slurm.scancel(job)
    slurm.wait_gone(job)

    assert output.read_text().count("saved in run 0") == 2, output.read_text()
    shown = slurm.run(["scontrol", "show", "job", job]).stdout
    assert "JobState=CANCELLED" in shown
    assert "Restarts=0" in shown


def test_a_script_of_the_user_needs_no_srun(slurm: Slurm) -> None:
    """In a batch script meshrun starts its launchers by srun, and passes on the exit code."""
    words = command("--nnodes", "2", "--mesh", "dp=2,tp=2", "--no-prefix", NODES)
    fails = command("--nnodes", "2", "--nproc-per-node", "1", PROGRAMS / "end.py", "7")
    printed = slurm.sbatch(f"{' '.join(words)}\n{' '.join(fails)}\necho code $?", "--nodes=2")

    assert re.findall(r"rank \d of 4.* sum 6", printed).__len__() == 4, printed
    assert printed.count("srun starts a launcher on each of 2 nodes") == 2
    assert printed.splitlines()[-1] == "code 7", printed
