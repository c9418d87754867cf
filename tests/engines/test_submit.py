"""--submit slurm on a real Slurm: jobs that run, are preempted, cancelled or rejected."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.engines.accounting import why_no_accounting
from tests.engines.slurm import Slurm, start_slurm, why_no_slurm
from tests.kit import FAKES, PROGRAMS, WAS_LOST, command, run_meshrun, wait_until

pytestmark = pytest.mark.torch
NODES = PROGRAMS / "nodes.py"
ELASTIC = PROGRAMS / "elastic.py"
REQUEUED = PROGRAMS / "requeued.py"
PATIENT = """\
import os, signal

until, asked = os.pipe()
signal.signal(signal.SIGTERM, lambda *_: os.write(asked, b"!"))
print("trains", flush=True)
for _ in range(8):
    os.read(until, 1)
print("saved", flush=True)
"""
"""Saves only after several SIGTERMs, from Slurm itself or from meshrun."""


def submit(slurm: Slurm, folder: Path, *args: str | Path) -> tuple[str, Path]:
    """Submit a job; return its id and its output file."""
    sent = slurm.run(command("--submit", "slurm", *args), cwd=folder)
    assert sent.returncode == 0, sent.stderr
    job = sent.stdout.strip()
    output = Path(sent.stderr.strip().rpartition("output: ")[2])
    assert output == folder / f"{Path(str(args[-1])).stem}-{job}.out"
    return job, output


def wait_for(output: Path, text: str, count: int = 1) -> None:
    """Wait until a job's output contains ``text`` ``count`` times."""

    def read() -> str:
        return output.read_text() if output.exists() else ""

    wait_until(lambda: read().count(text) >= count, lambda: f"{count} x {text!r} in {read()}")


def start_shell(
    slurm: Slurm, folder: Path, *args: str | Path, options: Sequence[str] = ("--nodes=2",)
) -> tuple[subprocess.Popen[str], Path]:
    """Start meshrun in the shell of a job; return the shell and meshrun's output file.

    The shell writes meshrun's process id to the file ``pid``, its exit code to ``code``.
    """
    words, script, output = shlex.join(command(*args)), folder / "script", folder / "out"
    script.write_text(
        f"#!/bin/bash\nexport TMPDIR={folder}\ncd {folder}\n"
        f"(echo $BASHPID > pid; exec {words} > {output} 2>&1)\necho $? > code\n"
    )
    script.chmod(0o755)
    return slurm.popen("salloc", *options, script, cwd=folder, text=True), output


def interrupt(folder: Path) -> None:
    """Press Ctrl-C in that shell."""
    os.kill(int((folder / "pid").read_text()), signal.SIGINT)


def interrupt_until(text: str, folder: Path) -> None:
    """Press Ctrl-C again and again, until meshrun prints a text."""
    output = folder / "out"
    wait_until(lambda: text in output.read_text() or interrupt(folder), output.read_text)


def test_a_job_runs_on_its_nodes(slurm: Slurm, tmp_path: Path) -> None:
    """With characters in the folder's name that a script has to quote."""
    folder = tmp_path / "it's a #1 $folder"
    folder.mkdir()
    job, output = submit(
        slurm,
        folder,
        "--nnodes",
        "2",
        "--mesh",
        "dp=2,tp=2",
        "--device",
        "cpu",
        "--no-prefix",
        NODES,
    )
    slurm.wait_gone(job)

    lines = [line for line in output.read_text().splitlines() if line.startswith("rank")]
    assert sorted(re.sub(r" on sl\d", "", line) for line in lines) == [
        "rank 0 of 4: dp 0 tp 0, sum 6",
        "rank 1 of 4: dp 0 tp 1, sum 6",
        "rank 2 of 4: dp 1 tp 0, sum 6",
        "rank 3 of 4: dp 1 tp 1, sum 6",
    ], output.read_text()


@pytest.fixture
def containers(slurm: Slurm, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """An image, and a folder that its containers see only if it is mounted."""
    compiler, library = shutil.which(os.environ.get("CC", "cc")), tmp_path / "containers.so"
    if compiler is None or not Path("/usr/include/slurm/spank.h").exists():
        pytest.skip("a Slurm plug-in needs a C compiler and libslurm-dev")
    source = FAKES / "slurm" / "containers.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    image, hidden = tmp_path / "image", tmp_path / "home"
    (image / "bin").mkdir(parents=True)
    launcher = image / "bin" / "meshrun"
    launcher.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, command()))} "$@"\n')
    launcher.chmod(0o755)
    hidden.mkdir()
    with slurm.plug_in(library, hidden):
        yield image, hidden


@pytest.mark.nightly
def test_a_job_in_containers_works_in_its_folder(
    slurm: Slurm, containers: tuple[Path, Path]
) -> None:
    """The image's launcher runs a program from that folder, which writes its files there.

    The user's own mounts are kept, and so is a working directory that the user sets.
    """
    image, hidden = containers
    folder, data = hidden / "me" / "project", hidden / "data"
    folder.mkdir(parents=True)
    data.mkdir()
    (data / "text").write_text("42")
    program = f"""\
import os
name = "saved-" + os.environ["RANK"]
with open("{hidden}/mounted/text") as data, open(name, "w") as saved:
    saved.write(os.getcwd() + " " + data.read())
"""
    (folder / "train.py").write_text(program)
    two = ("--image", image, "--nnodes", "2", "--nproc-per-node", "1", "--device", "cpu")
    mounts = ("--submit-arg", f"--container-mounts={data}:{hidden}/mounted")
    job, output = submit(slurm, folder, *two, *mounts, "train.py")
    slurm.wait_gone(job)
    elsewhere = ("--submit-arg", f"--container-workdir={image}")
    job, other = submit(slurm, folder, *two, *elsewhere, "train.py")
    slurm.wait_gone(job)

    saved = {path.name: path.read_text() for path in folder.glob("saved-*")}
    assert saved == dict.fromkeys(("saved-0", "saved-1"), f"{folder} 42"), output.read_text()
    assert f"error: can't open file '{image}/train.py'" in other.read_text()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("nnodes", ["2", "1:2"], ids=["fixed", "elastic"])
def test_a_preempted_job_goes_on(slurm: Slurm, tmp_path: Path, nnodes: str) -> None:
    """Its ranks exit cleanly on SIGTERM, so it is requeued and runs again."""
    job, output = submit(slurm, tmp_path, "--nnodes", nnodes, "--nproc-per-node", "1", REQUEUED)
    wait_for(output, "trains in run 0", 2)
    slurm.scancel("--signal=TERM", job)  # as Slurm does before the time limit
    wait_for(output, "trains in run 1", 2)
    slurm.wait_gone(job)

    assert output.read_text().count("saved in run 0") == 2, output.read_text()


@pytest.mark.nightly
def test_slurm_may_repeat_its_sigterm(slurm: Slurm, tmp_path: Path) -> None:
    """As at the time limit: repeated SIGTERMs do not shorten the ranks' grace period."""
    patient = tmp_path / "patient.py"
    patient.write_text(PATIENT)
    job, output = submit(
        slurm, tmp_path, "--nnodes", "2", "--nproc-per-node", "1", "--submit-arg=--no-requeue",
        patient,
    )  # fmt: skip
    wait_for(output, "trains", 2)

    def ask_again() -> bool:
        slurm.scancel("--signal=TERM", job)
        return output.read_text().count("saved") == 2

    wait_until(ask_again, output.read_text)
    slurm.wait_gone(job)

    assert "ExitCode=75:0" in slurm.run(["scontrol", "show", "job", job]).stdout
    assert "are left" not in output.read_text()


@pytest.mark.slow
@pytest.mark.nightly
def test_a_job_gives_way_to_an_urgent_one_and_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    """Slurm preempts it: it saves within the grace period, frees its nodes at once and resumes."""
    job, output = submit(slurm, tmp_path, "--nnodes", "2", "--nproc-per-node", "1", REQUEUED)
    wait_for(output, "trains in run 0", 2)
    urgent = ("--partition=urgent", "--nodes=3", "--exclusive")
    printed = slurm.sbatch(f"cat {output}; squeue --noheader --jobs={job} --format=%r,%T", *urgent)

    assert printed.count("saved in run 0") == 2, printed
    assert printed.splitlines()[-1].endswith(",PENDING"), printed
    wait_for(output, "trains in run 1", 2)
    slurm.wait_gone(job)
    shown = slurm.run(["scontrol", "show", "job", job]).stdout
    assert "JobState=COMPLETED" in shown, shown
    assert "Restarts=1 " in shown, shown


@pytest.mark.nightly
def test_a_cancelled_job_does_not_go_on(slurm: Slurm, tmp_path: Path) -> None:
    """Its ranks exit cleanly on SIGTERM too, but it is not requeued."""
    job, output = submit(slurm, tmp_path, "--nnodes", "2", "--nproc-per-node", "1", REQUEUED)
    wait_for(output, "trains in run 0", 2)
    slurm.scancel(job)
    slurm.wait_gone(job)

    assert output.read_text().count("saved in run 0") == 2, output.read_text()
    shown = slurm.run(["scontrol", "show", "job", job]).stdout
    assert "JobState=CANCELLED" in shown
    assert "Restarts=0" in shown


@pytest.mark.slow
@pytest.mark.nightly
def test_sacct_shows_what_became_of_jobs(tmp_path: Path) -> None:
    """The preempted job ran twice and completed; the one with an excluded node failed with 78."""
    if (reason := why_no_slurm() or why_no_accounting()) is not None:
        pytest.skip(reason)
    excluded = tmp_path / "excluded.py"
    excluded.write_text("import meshrun\n\nmeshrun.exclude_node('its disk is slow')\n")
    nodes = ("--nnodes", "2", "--nproc-per-node", "1", "--device", "cpu")
    with start_slurm(own_name="loopback", records=True) as slurm:
        failed, _ = submit(slurm, tmp_path, *nodes, excluded)
        preempted, output = submit(slurm, tmp_path, *nodes, REQUEUED)
        wait_for(output, "trains in run 0", 2)
        slurm.scancel("--signal=TERM", preempted)
        wait_for(output, "trains in run 1", 2)
        shown = ["sacct", "--allocations", "--duplicates", "--noheader", "--parsable2"]
        shown += ["--format=JobID,State,ExitCode"]

        def records() -> list[str]:
            return sorted(slurm.run(shown).stdout.splitlines())

        wait_until(lambda: "COMPLETED" in " ".join(records()), lambda: f"{records()}")

        assert records() == [
            f"{failed}|FAILED|78:0", f"{preempted}|COMPLETED|0:0", f"{preempted}|REQUEUED|0:0",
        ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.nightly
def test_an_elastic_job_continues_without_a_machine(tmp_path: Path) -> None:
    """It gets all nodes; one is lost, and the job succeeds on the others."""
    if (reason := why_no_slurm()) is not None:
        pytest.skip(reason)
    with start_slurm(own_name="loopback") as slurm:
        sent = slurm.run(
            command("--submit", "slurm", "--nnodes", "2:8", "--mesh", "dp=1:8", "--device", "cpu",
                    "--nproc-per-node", "1", "--submit-arg=--output=out", ELASTIC, tmp_path),
            cwd=tmp_path, env={"TMPDIR": str(tmp_path)},  # where a lost machine leaves its folder
        )  # fmt: skip
        job, output = sent.stdout.strip(), tmp_path / "out"
        wait_for(output, " of 3 in 0 on", 3)
        slurm.hosts.kill_all(2)
        wait_for(output, " of 2 in 1 on", 2)
        (tmp_path / "go").touch()
        slurm.wait_gone(job)

        shown = slurm.run(["scontrol", "show", "job", job]).stdout
        assert "JobState=COMPLETED" in shown, output.read_text() + shown
        assert "Restarts=0 " in shown, shown


@pytest.mark.nightly
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_range_of_nodes_in_a_shell_uses_those_of_the_job(
    slurm: Slurm, tmp_path: Path, signum: signal.Signals
) -> None:
    """Three of up to eight; one leaves or is lost, and the exit code is the launch's."""
    words = command(
        "--nnodes", "2:8", "--mesh", "dp=1:8", "--nproc-per-node", "1", ELASTIC, tmp_path
    )  # fmt: skip
    output = tmp_path / "out"
    script = tmp_path / "script"
    script.write_text(f"#!/bin/bash\n{shlex.join(map(str, words))} > {output} 2>&1; echo $?\n")
    script.chmod(0o755)
    shell = slurm.popen("salloc", "--nodes=3", script, stdout=subprocess.PIPE, text=True)
    wait_for(output, " of 3 in 0 on", 3)
    (launcher,) = [
        process for process in map(psutil.Process, slurm.hosts.processes(2))
        if "meshrun launcher" in " ".join(process.cmdline())
    ]  # fmt: skip
    launcher.send_signal(signum)
    wait_for(output, " of 2 in 1 on", 2)
    (tmp_path / "go").touch()

    assert shell.communicate(timeout=90)[0] == "0\n", output.read_text()


@pytest.mark.nightly
def test_tasks_of_an_array_do_not_meet(slurm: Slurm, tmp_path: Path) -> None:
    """They run at the same time on the same nodes, each with its own output file."""
    sent = slurm.run(
        command("--submit", "slurm", "--nnodes", "2", "--mesh", "dp=2", "--device", "cpu",
                "--no-prefix", "--submit-arg=--array=3-4", NODES),
        cwd=tmp_path,
    )  # fmt: skip
    job = sent.stdout.strip()
    slurm.wait_gone(job)

    assert sent.stderr.endswith(f"output: {tmp_path}/nodes-{job}_%a.out\n")
    for task in (3, 4):
        printed = (tmp_path / f"nodes-{job}_{task}.out").read_text()
        assert re.findall(r"rank (\d) of 2.*, sum 1", printed).__len__() == 2, printed


@pytest.mark.nightly
def test_a_heterogeneous_job_is_one_launch(slurm: Slurm) -> None:
    """Its nodes are numbered by component, not by name; a step and a shell use all of them."""
    words = shlex.join(map(str, command("--nnodes", "3", "--mesh", "dp=3", "--no-prefix", NODES)))
    other = words.replace("--nnodes 3", "--nnodes 2")
    step = f"srun --het-group=0,1 --ntasks-per-node=1 {words.replace('--nnodes 3', '')}"
    shell = slurm.salloc(
        "--nodes=1", "--nodelist=sl2", ":", "--nodes=2", "sh", "-c", f"{step}; {words}; {other}"
    )

    assert shell.stdout.count("rank 0 of 3 on sl2: dp 0, sum 3") == 2, shell.stderr
    assert shell.stdout.count(", sum 3") == 6
    assert "--nnodes 2, but the components of the Slurm job have 1 + 2 nodes" in shell.stderr


@pytest.mark.nightly
def test_signals_reach_all_components_of_a_heterogeneous_job(slurm: Slurm, tmp_path: Path) -> None:
    """A forwarded one, and SIGQUIT, which also reaches ranks here, but only asks where they are."""
    program = tmp_path / "waits.py"
    program.write_text(
        "import signal\nsignal.signal(signal.SIGUSR2, lambda *_: print('got it', flush=True))\n"
        "print('waits', flush=True)\nwhile True: signal.pause()\n"
    )
    words = ("--nnodes", "3", "--nproc-per-node", "1", "--forward", "USR2", program)
    both = ("--nodes=1", ":", "--nodes=2")
    shell, output = start_shell(slurm, tmp_path, *words, options=both)
    wait_for(output, "waits", 3)
    meshrun = int((tmp_path / "pid").read_text())
    os.kill(meshrun, signal.SIGUSR2)
    wait_until(
        lambda: all(f"[rank {rank}] got it" in output.read_text() for rank in range(3)),
        output.read_text,
    )
    os.kill(meshrun, signal.SIGQUIT)
    for rank in range(3):
        wait_for(output, f"rank {rank}: waits.py:4 in <module>")
    interrupt(tmp_path)
    shell.communicate(timeout=90)

    assert (tmp_path / "code").read_text() == "130\n", output.read_text()


@pytest.mark.nightly
def test_a_users_script_needs_no_srun(slurm: Slurm) -> None:
    """In a batch script, meshrun starts its launchers with srun and passes on the exit code."""
    words = command("--nnodes", "2", "--mesh", "dp=2,tp=2", "--no-prefix", NODES)
    fails = command("--nnodes", "2", "--nproc-per-node", "1", PROGRAMS / "end.py", "7")
    printed = slurm.sbatch(f"{' '.join(words)}\n{' '.join(fails)}\necho code $?", "--nodes=2")

    assert re.findall(r"rank \d of 4.* sum 6", printed).__len__() == 4, printed
    assert printed.count("starting a launcher on each of 2 nodes with srun") == 2
    assert printed.splitlines()[-1] == "code 7", printed


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["salloc", "sbatch", "stderr elsewhere"])
def test_a_terminated_launch_in_a_shell_ends_its_launchers(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """They save, and the exit code is that of a preempted launch."""
    if where == "stderr elsewhere":
        monkeypatch.setenv("SLURM_STDERRMODE", str(tmp_path / "err"))
    words = " ".join(command("--nnodes", "2", "--nproc-per-node", "1", REQUEUED))
    script = tmp_path / "script"
    wait = '& pid=$!; while ! [ $(grep -c trains "$0.out") = 2 ]; do sleep 0.05; done'
    script.write_text(f'#!/bin/bash\n{words} > "$0.out" 2>&1 {wait}; kill $pid; wait $pid; echo $?')
    script.chmod(0o755)
    (tmp_path / "script.out").touch()
    if where == "sbatch":
        printed = slurm.sbatch(f"exec {script}", "--nodes=2")
    else:
        printed = slurm.salloc("--nodes=2", script).stdout

    text = (tmp_path / "script.out").read_text()
    assert printed.splitlines()[-1] == "75", text
    assert text.count("saved in run 0") == 2, text


@pytest.mark.nightly
def test_a_killed_launch_in_a_shell_leaves_no_process(slurm: Slurm, tmp_path: Path) -> None:
    """No srun, launcher or rank; the fixture of every test checks this."""
    words = " ".join(command("--nnodes", "2", "--nproc-per-node", "1", REQUEUED))
    script = tmp_path / "script"
    script.write_text(
        "#!/bin/bash\nexport TMPDIR=${0%/*}\n"  # Slurm kills the launchers, so their folders stay
        f'{words} > "$0.out" 2>&1 & pid=$!\n'
        'while ! [ $(grep -c trains "$0.out") = 2 ]; do sleep 0.05; done\n'
        "kill -9 $pid; wait $pid; echo $?"
    )
    script.chmod(0o755)
    (tmp_path / "script.out").touch()
    done = slurm.salloc("--nodes=2", script)

    assert done.stdout.splitlines()[-1] == "137", done.stderr


@pytest.mark.nightly
def test_a_node_whose_slurmstepd_was_killed_is_left_out(slurm: Slurm, tmp_path: Path) -> None:
    """Its launcher notices; srun never does and would wait for it."""
    shell, output = start_shell(
        slurm, tmp_path, "--nnodes", "2:3", "--mesh", "dp=1:3", "--nproc-per-node", "1",
        ELASTIC, tmp_path, options=("--nodes=3", "--no-kill"),
    )  # fmt: skip
    wait_for(output, " of 3 in 0 on", 3)
    for daemon in slurm.daemons(2, "slurmstepd"):
        daemon.kill()
    wait_for(output, " of 2 in 1 on", 2)
    (tmp_path / "go").touch()
    wait_for(output, "a launcher has exited; waiting up to 90 s")
    for line in ("making srun kill", "leaving without confirmation"):
        interrupt(tmp_path)
        wait_for(output, line)
    wait_for(tmp_path / "code", "0\n")
    shell.communicate(timeout=90)

    assert f"(sl2){WAS_LOST}it was stopped because its slurmstepd has exited" in output.read_text()


@pytest.mark.nightly
def test_srun_that_was_killed_is_named(slurm: Slurm, tmp_path: Path) -> None:
    """It ends the launch with the exit code of its signal."""
    shell, output = start_shell(slurm, tmp_path, "--nnodes", "2", "--nproc-per-node", "1", REQUEUED)
    wait_for(output, "trains in run 0", 2)
    meshrun = psutil.Process(int((tmp_path / "pid").read_text()))
    for srun in meshrun.children():
        srun.kill()
    wait_for(tmp_path / "code", "137\n")
    shell.communicate(timeout=90)

    assert "error: srun was killed by SIGKILL on this host" in output.read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("silent", ["controller", "all"])
def test_ctrl_c_needs_no_answer_from_slurm(slurm: Slurm, tmp_path: Path, silent: str) -> None:
    """It reaches launchers through srun; if no daemon answers, it kills srun, then exits."""
    shell, output = start_shell(slurm, tmp_path, "--nnodes", "2", "--nproc-per-node", "1", REQUEUED)
    wait_for(output, "trains in run 0", 2)
    names = ("slurmctld", *(("slurmd", "slurmstepd") if silent == "all" else ()))
    with slurm.stopped(*names):
        if silent == "all":
            for line in ("making srun kill", "leaving without confirmation"):
                interrupt_until(line, tmp_path)
        else:
            interrupt(tmp_path)
        wait_for(tmp_path / "code", "130\n")
    shell.communicate(timeout=90)

    text = output.read_text()
    assert text.count("stopped by Ctrl-C") == (0 if silent == "all" else 2), text
    assert ("squeue --steps --jobs=" in text) == (silent == "all"), text


@pytest.mark.nightly
def test_ctrl_c_may_come_quickly(slurm: Slurm, tmp_path: Path) -> None:
    """srun would kill the launchers at the second one within a second."""
    shell, output = start_shell(slurm, tmp_path, "--nnodes", "2", "--nproc-per-node", "1", REQUEUED)
    wait_for(output, "trains in run 0", 2)
    for _ in range(2):
        interrupt(tmp_path)
    wait_for(tmp_path / "code", "130\n")
    shell.communicate(timeout=90)

    assert output.read_text().count("stopped by Ctrl-C") == 2, output.read_text()


@pytest.mark.nightly
def test_cancelling_a_script_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    """Ranks save within Slurm's grace period, although the script's shell is signalled too."""
    words = " ".join(command("--nnodes", "2", "--nproc-per-node", "1", REQUEUED))
    output = tmp_path / "out"
    (tmp_path / "job").write_text(f"#!/bin/bash\n{words}\n")
    sent = slurm.run(["sbatch", "--parsable", "--nodes=2", f"--output={output}", tmp_path / "job"])
    job = sent.stdout.strip()
    wait_for(output, "trains in run 0", 2)
    slurm.scancel(job)
    slurm.wait_gone(job)

    assert output.read_text().count("saved in run 0") == 2, output.read_text()


@pytest.mark.nightly
def test_one_node_needs_no_srun(slurm: Slurm) -> None:
    """With --standalone or no --nnodes, the launch runs in this shell."""
    words = " ".join(command("--mesh", "dp=2", "--no-prefix", NODES))
    printed = slurm.salloc(
        "--nodes=2", "sh", "-c", f"{words}; {words.replace('--mesh', '--standalone --mesh')}"
    )

    assert printed.stdout.count("of 2 on sl0") == 4, printed.stderr
    assert "with srun" not in printed.stderr
    assert printed.stderr.count("one of 2 nodes; to use all: --nnodes 2") == 1


def test_a_dry_run_in_a_shell_plans_for_all_nodes(slurm: Slurm) -> None:
    """A mesh that does not fit is reported once, before anything starts."""
    looks = slurm.salloc("--nodes=2", *command("--nnodes", "2", "--mesh", "4", "-n", NODES))
    wrong = slurm.salloc("--nodes=2", *command("--nnodes", "2", "--mesh", "3", NODES))

    assert looks.stdout.startswith("mesh 4: 4 ranks on 2 nodes x 2 workers"), looks.stderr
    assert wrong.stderr.count("error: mesh `3` needs 3 workers") == 1, wrong.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--submit-arg=--partition=none", NODES], "invalid partition specified: none"),
        (["--submit-arg=--gres=tpu:1", NODES], "or --device cpu for none"),
    ],
)
def test_a_refusal_is_shown_in_slurms_own_words(
    slurm: Slurm, args: list[str | Path], words: str
) -> None:
    """With a hint, if there is one."""
    refused = slurm.run(command("--submit", "slurm", *args))

    assert refused.returncode == 71
    assert refused.stdout == ""
    assert "error: sbatch refused the job: " in refused.stderr
    assert words in refused.stderr


def test_a_machine_without_sbatch_says_so(tmp_path: Path) -> None:
    """With a hint."""
    (tmp_path / "train.py").touch()
    ours = run_meshrun("--submit", "slurm", "train.py", env={"PATH": "/nowhere"}, cwd=tmp_path)

    assert ours.returncode == 71
    assert ours.stderr == (
        "error: sbatch is not installed on this machine\n\nhint: write the job with --dry-run"
        " -o FILE, and run sbatch where it is installed\n"
    )
