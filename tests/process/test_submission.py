"""--submit with stand-ins for the schedulers' commands that record what they are given."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshrun import launch
from meshrun.errors import UsageError
from tests.kit import command, run_meshrun, start_meshrun, wait_until
from tests.kubernetes_api import api_server

COMMAND = """\
import json, sys
with open(__file__ + ".json", "a") as file:
    file.write(json.dumps({"argv": sys.argv[1:], "stdin": sys.stdin.read()}) + "\\n")
said, code = ANSWERS.get(sys.argv[1], (sys.argv[1], 0))
print(said)
sys.exit(code)
"""
MADE = json.dumps(
    {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train", "uid": "u-1"}}
)


@pytest.fixture
def folder(tmp_path: Path, fake_torch: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a program, first on the PATH so that tests can put commands there."""
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_command(folder: Path, name: str, answers: dict[str, tuple[str, int]]) -> None:
    """Create a command that records each call, and answers by its first word."""
    text = COMMAND.replace("ANSWERS", repr(answers))
    (folder / name).write_text(f"#!{sys.executable}\n{text}")
    (folder / name).chmod(0o755)


def make_script(folder: Path, name: str, *lines: str) -> None:
    """Create a command that is a shell script."""
    (folder / name).write_text("\n".join(("#!/bin/sh", *lines, "")))
    (folder / name).chmod(0o755)


def calls(folder: Path, name: str) -> list[tuple[list[str], str]]:
    """Return the arguments and stdin of each call of a command."""
    lines = (folder / f"{name}.json").read_text().splitlines()
    return [(each["argv"], each["stdin"]) for each in map(json.loads, lines)]


def test_sbatch_gets_the_script_that_a_dry_run_shows(folder: Path) -> None:
    """Only the job's number is printed to stdout, without the cluster's name if sbatch adds it."""
    make_command(folder, "sbatch", {"--parsable": ("41;cluster", 0)})
    words = ["--submit", "slurm", "--nnodes", "2", "--mesh", "2", "train.py", "--lr", "1"]
    shown = run_meshrun("-n", *words)
    kept = run_meshrun("-n", "-o", "job.sh", *words)
    sent = run_meshrun(*words)

    assert (sent.returncode, sent.stdout) == (0, "41\n")
    assert sent.stderr == f"meshrun: submitted Slurm job 41, train; output: {folder}/train-41.out\n"
    assert calls(folder, "sbatch") == [(["--parsable"], shown.stdout)]
    assert (kept.stdout, (folder / "job.sh").read_text()) == ("", shown.stdout)

    named = run_meshrun("--submit-arg", "-J 'my job'", *words)
    assert named.stderr.endswith(f"job 41, my job; output: {folder}/my job-41.out\n")


def test_kubectl_makes_a_job_that_owns_the_rest(folder: Path) -> None:
    """A Service, and a Secret that is new each time and never shown; --submit-arg is split."""
    make_command(folder, "kubectl", {"create": (MADE, 0), "apply": ("service/train created", 0)})
    words = ["--submit", "kubernetes", "--image", "a", "--submit-arg", "-n ml", "--rdzv-id",
             "train", "--export", "HF_*,*SECRET,BASH_*", "--metrics", ":9400",
             "train.py"]  # fmt: skip
    variables = {"HF_TOKEN": "hf_hush", "HF_HOME": "/data", "MESHRUN_SECRET": "of this shell",
                 "BASH_FUNC_f%%": "() { :; }"}  # fmt: skip
    submitted = [run_meshrun(*words, env=variables) for _ in range(2)]
    shown = run_meshrun("-n", *words, env=variables).stdout

    printed = "job.batch/train created\nservice/train created\n"
    why = (
        "meshrun: no probes in the manifest: --metrics is open on 127.0.0.1 only, where nothing"
        " outside the pod reaches it; use --metrics 0.0.0.0:9400\n"
    )
    results = [(ours.returncode, ours.stdout, ours.stderr) for ours in submitted]
    assert results == [(0, printed, why)] * 2
    (create, job), (apply, rest), _, (_, other) = calls(folder, "kubectl")
    assert create == ["create", "-f", "-", "-o", "json", "-n", "ml"]
    assert apply == ["apply", "--server-side", "--force-conflicts", "-f", "-", "-n", "ml"]
    assert shown.endswith(job)
    assert rest.count("ownerReferences:") == rest.count("kind: Job") == rest.count("uid: u-1") == 2
    secrets = [
        text.partition("  meshrun-secret: ")[2].split()[0].strip('"') for text in (rest, other)
    ]
    assert [len(secret) for secret in secrets] == [64, 64]
    assert secrets[0] != secrets[1]
    assert rest.count("hf_hush") == 1
    assert "hf_hush" not in shown
    assert job.count("/data") == job.count("name: MESHRUN_SECRET") == 1
    assert "of this shell" not in job + rest
    assert "BASH_FUNC" not in job


@pytest.mark.parametrize(
    ("answers", "message", "verbs"),
    [
        ({"create": ('Error (AlreadyExists): jobs.batch "train" already exists', 1)},
         "hint: `kubectl delete` the existing `train`, or leave out --rdzv-id to get a new name",
          ["create"]),
        ({"apply": ("forbidden", 1)}, "kubectl refused the job: forbidden",
         ["create", "apply", "delete"]),
        ({"create": ("job.batch/train", 0)}, "remove any --submit-arg that chooses another output",
         ["create"]),
    ],
    ids=["name in use", "no secret", "other output"],
)  # fmt: skip
def test_an_error_of_kubectl_is_passed_on(
    folder: Path, answers: dict[str, tuple[str, int]], message: str, verbs: list[str]
) -> None:
    """With a hint, and a job that is only half created is deleted."""
    make_command(folder, "kubectl", {"create": (MADE, 0), **answers})
    ours = run_meshrun("--submit", "kubernetes", "--image", "a", "--rdzv-id", "train", "train.py")

    assert ours.returncode == 71
    assert message in ours.stderr
    assert [argv[0] for argv, _ in calls(folder, "kubectl")] == verbs


def test_the_real_kubectl_sends_the_job_and_what_it_owns(folder: Path) -> None:
    """A secret is in the Secret alone, not even in an annotation of kubectl's."""
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    variables = {"HF_TOKEN": "hf_hush", "HOME": str(folder), "KUBECONFIG": "/dev/null"}
    with api_server() as (url, sent):
        ours = run_meshrun(
            "--submit", "kubernetes", "--image", "a", "--rdzv-id", "train", "--export", "HF_TOKEN",
            f"--submit-arg=--server={url} --namespace=ml", "train.py", env=variables,
        )  # fmt: skip
    (_, path, job), *others = sent
    rest = {each["kind"]: each for _, _, each in others}
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "uid-0"}

    assert ours.returncode == 0, ours.stderr
    assert path.startswith("/apis/batch/v1/namespaces/ml/jobs?")
    assert job["spec"]["completionMode"] == "Indexed"
    assert set(rest) == {"Service", "Secret"}
    assert all(each["metadata"]["ownerReferences"] == [owner] for each in rest.values())
    assert rest["Secret"].pop("stringData")["HF_TOKEN"] == "hf_hush"
    assert "hf_hush" not in json.dumps(sent) + ours.stdout + ours.stderr


def test_each_job_without_a_name_gets_a_new_one(folder: Path) -> None:
    """A second job of the same program is not refused."""
    words = ["--submit", "jobset", "--image", "a", "-n", "train.py"]
    names = [
        re.search(
            r"kind: JobSet\nmetadata:\n  name: (train-[0-9a-f]{6})\n", run_meshrun(*words).stdout
        )
        for _ in range(2)
    ]

    assert names[0] is not None
    assert names[1] is not None
    assert names[0][1] != names[1][1]


def test_variables_become_options_and_none_submits(folder: Path) -> None:
    """A job would inherit MESHRUN_SUBMIT and submit again; one that names a node is refused."""
    mesh = {"MESHRUN_MESH": "dp=2,tp=2", "PET_NNODES": "2", "MESHRUN_IMAGE": "a"}
    pod = run_meshrun("--submit", "kubernetes", "-n", "train.py", env=mesh)
    plan = run_meshrun("-n", "train.py", env={"MESHRUN_SUBMIT": "slurm", "MESHRUN_IMAGE": "a"})
    node = run_meshrun("--submit", "slurm", "-n", "train.py", env={"PET_NODE_RANK": "1"})
    hosts = run_meshrun("--submit", "slurm", "-n", "train.py", env={"MESHRUN_HOSTS": "a,b"})
    without_hosts = {"MESHRUN_SSH": "ssh -v", "MESHRUN_LAUNCHER": "ssh"}
    ssh = run_meshrun("--submit", "slurm", "-n", "train.py", env=without_hosts)

    assert '- "--mesh"\n            - "dp=2,tp=2"\n            - "--nnodes"\n' in pod.stdout
    assert plan.stdout.startswith("no mesh: 1 rank"), plan.stderr
    assert "--submit cannot be used with --node-rank in PET_NODE_RANK" in node.stderr
    assert "hint: unset PET_NODE_RANK" in node.stderr
    assert "--submit cannot be used with --hosts in MESHRUN_HOSTS" in hosts.stderr
    assert ssh.returncode == 0, ssh.stderr
    assert "--ssh" not in ssh.stdout
    assert "--launcher" not in ssh.stdout


def test_a_secret_among_the_arguments_is_warned_of(folder: Path) -> None:
    """It is kept, as the job needs it; a number is not taken for a secret."""
    words = [
        "--submit",
        "slurm",
        "-n",
        "train.py",
        "--num-keys",
        "1234567",
        "--api-key",
        "hush-hush",
    ]
    ours = run_meshrun(*words)

    assert "--api-key hush-hush" in ours.stdout
    assert ours.stderr.count("looks like a secret") == 1
    assert ours.stderr.startswith("meshrun: --api-key looks like a secret")
    assert "hush" not in ours.stderr


def test_launch_cannot_submit(folder: Path) -> None:
    """It would return before any rank starts, and the job would write the caller's report."""
    with pytest.raises(UsageError, match=r"--submit cannot be used with launch\(\)"):
        launch("train.py", nnodes=2, options=["--submit", "slurm", "--dry-run"])


def test_only_the_command_line_starts_srun_in_a_shell_of_a_job(folder: Path) -> None:
    """launch() waits for a process of its own, so it raises an error that says what to run."""
    make_script(folder, "srun", 'echo "$@" > srun.words')
    job = {"SLURM_JOB_ID": "7"}
    words = ["--nnodes", "2", "--nproc-per-node", "1", "train.py"]
    with pytest.raises(UsageError, match="--nnodes 2 in a Slurm shell") as refused:
        launch("train.py", nnodes=2, nproc_per_node=1, env=job)
    assert not (folder / "srun.words").exists()
    ours = run_meshrun(*words, env=job)

    assert refused.value.hint == "start one launcher per node: srun --ntasks-per-node=1 python ..."
    assert (folder / "srun.words").read_text().endswith(f" launcher {' '.join(words)}\n")
    # srun's exit code 0 does not prove that the launchers ran, and this srun started none.
    assert ours.returncode == 69, ours.stderr
    assert "srun exited with 0, but no launcher has reported" in ours.stderr

    # Where the launchers' stderr does not come here, srun's exit code is all that is known.
    moved = run_meshrun(*words, env={**job, "SLURM_STDOUTMODE": "none"})
    os.mkfifo(folder / "unread")
    make_script(folder, "srun", "cat unread >&2")
    with subprocess.Popen(
        command(*words), env={**os.environ, **job}, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        process.stderr.readline()
        process.stderr.close()
        (folder / "unread").write_text("a warning\n")

    assert (moved.returncode, process.returncode) == (0, 0), moved.stderr


def test_srun_gets_signals_until_launchers_have_begun(folder: Path) -> None:
    """It passes on SIGINT; then they go to its stdin, which it copies to launchers.

    A signal to forward counts although the script ignores it: ``trap '' USR1``.
    """
    line = r"printf '\036%s {}\036\n' $MESHRUN_STEP >&2"
    make_script(
        folder,
        "srun",
        "trap 'touch passed' INT; touch runs; until [ -e passed ]; do sleep 0.05; done",
        line.format("begun 0"),
        "head -c 2 > orders",
        line.format("11 7"),
    )
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    words = ("--nnodes", "2", "--forward", "USR1", "train.py")
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with start_meshrun(*words, env=env, folder=folder) as run:
            wait_until((folder / "runs").exists, lambda: run.stderr)
            run.signal(signal.SIGINT)
            wait_until((folder / "orders").exists, lambda: run.stderr)
            for signum in (signal.SIGTERM, signal.SIGUSR1):
                run.signal(signum)
            code = run.wait()
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert code == 7, run.stderr
    assert sorted((folder / "orders").read_bytes()) == [signal.SIGUSR1, signal.SIGTERM]
