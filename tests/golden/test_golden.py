"""Output for people, word for word. UPDATE_GOLDEN=1 regenerates the files."""

import os
import re
import sys
from pathlib import Path

import pytest

import meshrun
from tests.kit import in_turn, run_meshrun

HERE = Path(__file__).parent

ERRORS: dict[str, list[str]] = {
    "no program": [],
    "a program that became the value of an option": ["--mesh", "train.py"],
    "help on an unknown topic": ["--help", "lgos"],
    "help on an unknown topic, with no close match": ["--nproc-per-node", "2", "-h", "training"],
    "a misspelled option": ["--mehs", "2x4", "train.py"],
    "an option without its value": ["--mesh"],
    "an option in place of a value": ["--log-dir", "--tee", "3", "train.py"],
    "help on an abbreviation": ["--help", "--log"],
    "a number of workers that is not a number": ["--nproc-per-node", "many", "train.py"],
    "an empty mesh": ["--mesh", "", "train.py"],
    "a colon": ["--mesh", "dp:2", "train.py"],
    "a colon in the second dim": ["--mesh", "dp=2,tp:4", "train.py"],
    "a duplicate name": ["--mesh", "dp=2,dp=4", "train.py"],
    "a size of zero": ["--mesh", "dp=2,tp=0", "train.py"],
    "a negative size": ["--mesh", "dp=-2", "train.py"],
    "a size too large": ["--mesh", "dp=12345678901", "train.py"],
    "two sizes to infer": ["--mesh=-1x-1", "train.py"],
    "commas between sizes": ["--mesh", "2,4", "train.py"],
    "sizes in brackets": ["--mesh", "(2,4)", "train.py"],
    "names without sizes": ["--mesh", "dp,tp", "train.py"],
    "a Python dict": ["--mesh", '{"dp": 2}', "train.py"],
    "dims with a space between them": ["--mesh", "dp=2", "tp=4", "train.py"],
    "a dim without its option": ["dp=2", "train.py"],
    "a dim without a name": ["--mesh", "dp=2,4", "train.py"],
    "a single dash": ["-mesh", "dp=2", "train.py"],
    "mpirun's option": ["-np", "2", "train.py"],
    "another launcher's option": ["--nprocs", "2", "train.py"],
    "a number after -n": ["-n", "2", "train.py"],
    "an empty program name": ["--mesh", "dp=2", ""],
    "an interpreter": ["--nproc-per-node", "2", "python", "train.py", "--lr", "1"],
    "a misspelled device type": ["--device", "cdua", "train.py"],
    "another launcher's device type": ["--device", "gpu", "train.py"],
    "a misspelled back end": ["--mesh", "dp=2", "--backend", "goo", "train.py"],
    "a back end for another device": [
        "--mesh", "dp=2", "--device", "cpu", "--backend", "dp=nccl", "train.py",
    ],
    "an unknown field in a template": ["--log-line-prefix-template", "${rnk}: ", "train.py"],
    "--format svg without a dry run": ["--format", "svg", "train.py"],
    "a prompt on two nodes": ["--interactive", "--nnodes", "2"],
    "a prompt for a command": ["--interactive", "--no-python", "ls"],
    "a prompt and a debugger": ["--interactive", "--debug-rank", "1", "train.py"],
    "a prompt and restarts": ["--interactive", "--max-restarts", "1", "train.py"],
    "a prompt and --watch": ["--interactive", "--watch"],
    "--watch on two nodes": ["--watch", "--nnodes", "2", "train.py"],
    "--standalone on two nodes": ["--standalone", "--nnodes", "2", "train.py"],
    "two prefix options": ["--prefix", "mesh", "--no-prefix", "train.py"],
    "a dangling symlink": ["gone.py"],
    "a binary program": [sys.executable, "train.py"],
    "a shell script": ["run.sh"],
    "a program without its extension": ["train"],
    "a command as the program": ["bash", "-c", "ls"],
    "options after the name of a check": ["--check", "--mesh", "dp=2", "quick", "--device", "cpu"],
    "a size that is not a number": ["--mesh", "dp=two", "train.py"],
    "a missing size": ["--mesh", "2x", "train.py"],
    "a missing dim": ["--mesh", "dp=2,", "train.py"],
    "a dim without a size": ["--mesh", "dp=2,tp", "train.py"],
    "too few names": ["--mesh", "2x4", "--names", "dp", "train.py"],
    "too many names": ["--mesh", "2", "--names", "dp,tp", "train.py"],
    "a name that torch would reject": ["--mesh", "2x4", "--names", "dp,dp", "train.py"],
    "an invalid name": ["--mesh", "2x4", "--names", "dp,2nd", "train.py"],
    "names given twice": ["--mesh", "dp=2,tp=4", "--names", "dp,tp", "train.py"],
    "names without a mesh": ["--names", "dp,tp", "train.py"],
    "a mesh that is too large": ["--mesh", "2x4", "--nproc-per-node", "6", "train.py"],
    "a mesh that is too small": ["--mesh", "dp=2,tp=2", "--nproc-per-node", "8", "train.py"],
    "a mesh that fits no node": ["--mesh", "2x4", "--nnodes", "3", "train.py"],
    "a mesh that is too large for two nodes": [
        "--mesh", "dp=2,tp=4", "--nnodes", "2", "--nproc-per-node", "3", "--dry-run", "train.py",
    ],
    "a size that cannot be inferred": ["--mesh", "dp=-1,tp=8", "--nproc-per-node", "6", "train.py"],
    "a size with nothing to infer it from": ["--mesh", "dp=-1", "train.py"],
    "no workers": ["--nproc-per-node", "0", "train.py"],
    "no nodes": ["--mesh", "2", "--nnodes", "0", "train.py"],
    "too many ranks": ["--mesh", "100000x1000", "train.py"],
    "a device with an index": ["--mesh", "2", "--device", "cuda:0", "train.py"],
    "a device that this machine lacks": ["--mesh", "2", "--device", "cuda", "train.py"],
    "a negative time": ["--shutdown-timeout", "-1", "train.py"],
    "a reversed range": ["--mesh", "dp=8:2", "train.py"],
    "a range that needs more ranks": ["--mesh", "dp=4:8,tp=4", "--nproc-per-node", "8", "train.py"],
    "two open sizes": ["--mesh", "dp=-1,tp=2:4", "train.py"],
    "different nodes, too few numbers": [
        "--mesh", "12", "--nnodes", "3", "--nproc-per-node", "8,4", "train.py",
    ],
    "hosts that cannot be parsed": ["--hosts", "a,b:x", "train.py"],
    "a duplicate host": ["--hosts", "a,b,a", "train.py"],
    "a missing hostfile": ["--hostfile", "nowhere", "train.py"],
    "--include of an unknown host": ["--hosts", "a:2,b:2", "--include", "c", "train.py"],
    "--include without hosts": ["--include", "a", "train.py"],
    "hosts and their number": ["--hosts", "a,b", "--nnodes", "3", "train.py"],
    "hosts and a node rank": ["--hosts", "a,b", "--node-rank", "1", "train.py"],
    "slots for only some hosts": ["--hosts", "a:1,b", "train.py"],
    "slots that do not fit": ["--hosts", "a:4,b:4", "--mesh", "dp=3,tp=4", "train.py"],
    "an unset variable": ["--hosts", "a,b", "--export", "NOT_SET", "train.py"],
    "a dim that crosses nodes": [
        "--mesh", "tp=4,dp=2", "--nnodes", "2", "--intra-node", "tp", "train.py",
    ],
    "a dim that fits no node": [
        "--mesh", "dp=2,tp=8", "--nnodes", "4", "--intra-node", "tp", "train.py",
    ],
    "dims that fit no node together": [
        "--mesh", "dp=2,cp=2,tp=4", "--nnodes", "4", "--intra-node", "tp,cp", "train.py",
    ],
    "blocks that do not fit": [
        "--mesh", "dp=4,tp=3", "--nproc-per-node", "8,4", "--intra-node", "tp", "train.py",
    ],
    "an unknown dim to keep within a node": [
        "--mesh", "dp=2,tp=2", "--intra-node", "pp", "train.py",
    ],
    "a dim that crosses domains": [
        "--mesh", "tp=8,dp=4", "--nnodes", "8", "--domain-size", "4", "--intra-domain", "tp",
        "train.py",
    ],
    "dims that fit no domain": [
        "--mesh", "cp=4,tp=8", "--nnodes", "8", "--domain-size", "4", "--intra-domain", "tp",
        "--intra-node", "cp", "train.py",
    ],
    "blocks that do not fit domains": [
        "--mesh", "dp=4,tp=8", "--nnodes", "8", "--domain-size", "3", "--intra-domain", "tp",
        "train.py",
    ],
    "unknown domains": [
        "--mesh", "dp=4,tp=8", "--nnodes", "8", "--intra-domain", "tp", "train.py",
    ],
    "an unknown dim to keep within a domain": [
        "--mesh", "dp=4,tp=8", "--nnodes", "8", "--domain-size", "4", "--intra-domain", "pp",
        "train.py",
    ],
    "a dim to keep within a domain, twice": [
        "--mesh", "dp=4,tp=8", "--nnodes", "8", "--domain-size", "4", "--intra-domain", "tp,tp",
        "train.py",
    ],
    "domains of zero nodes": ["--mesh", "8", "--nnodes", "8", "--domain-size", "0", "train.py"],
    "domains larger than the launch": [
        "--mesh", "8", "--nnodes", "8", "--domain-size", "18", "train.py",
    ],
    "--intra-domain without a mesh": [
        "--nnodes", "8", "--domain-size", "4", "--intra-domain", "tp", "train.py",
    ],
    "--place without dims to place": ["--mesh", "dp=2,tp=2", "--place", "auto", "train.py"],
    "an unknown dim to flatten": ["--mesh", "dp=2,tp=2", "--flatten", "dp+cp", "train.py"],
    "a view that does not fit": ["--mesh", "dp=2,tp=2", "--view", "moe:ep=3", "train.py"],
    "a view with other groups": ["--mesh", "dp=2,tp=4", "--view", "moe:tp=2,ep=4", "train.py"],
    "--show of an unknown dim": ["--mesh", "dp=2", "--show", "pp=0", "train.py"],
    "--hide without a dim": ["--mesh", "dp=2", "--hide", "1", "train.py"],
    "a rank to debug without an index": ["--mesh", "dp=2", "--debug-rank", "dp", "train.py"],
    "--warm-idle without a warm server": ["--warm-idle", "5m", "train.py"],
    "--color-dim without a picture": ["-n", "--mesh", "dp=2", "--color-dim", "dp", "train.py"],
    "a view without a mesh": ["--view", "moe:ep=3", "train.py"],
    "a rank out of range": ["--mesh", "2", "--rank", "2", "--dry-run", "train.py"],
    "--rank of two ranks": ["--mesh", "dp=2,tp=2", "--rank", "dp=1", "--dry-run", "train.py"],
    "a rank without a dry run": ["--mesh", "2", "--rank", "1", "train.py"],
    "a range of static nodes": ["--mesh", "4", "--nnodes", "2:4", "train.py"],
    "a node without the address of node 0": [
        "--mesh", "4", "--nnodes", "2", "--node-rank", "1", "train.py",
    ],
    "a range of nodes with three ends": ["--mesh", "4", "--nnodes", "2:20:30", "train.py"],
    "an unknown --console": ["--mesh", "4", "--console", "some", "train.py"],
    "a dry run with a rank to debug out of range": [
        "--mesh", "4", "--dry-run", "--debug-rank", "9", "train.py",
    ],
    "an unknown scheduler": ["--submit", "slrum", "train.py"],
    "a job without an image": ["--submit", "kubernetes", "--nnodes", "2", "train.py"],
    "an image without a job": ["--image", "torch", "train.py"],
    "a job with a node rank": ["--submit", "slurm", "--node-rank", "1", "train.py"],
    "a job with an endpoint": [
        "--submit", "slurm", "--nnodes", "2", "--rdzv-endpoint", "node1:29500", "train.py",
    ],
    "a job with a worker for each core of this machine": [
        "--submit", "slurm", "--nnodes", "2", "--nproc-per-node", "auto", "train.py",
    ],
    "a TrainJob with a range of nodes": [
        "--submit", "trainjob", "--image", "a", "--nnodes", "2:4", "train.py",
    ],
    "a patch for a script": ["--submit", "slurm", "--submit-patch", "p.yaml", "train.py"],
    "a missing patch": [
        "--submit", "kubernetes", "--image", "a", "--submit-patch", "p.yaml", "train.py",
    ],
    "fewer GPUs than workers": [
        "--submit", "slurm", "--nnodes", "2", "--nproc-per-node", "8", "--device", "cuda",
        "--submit-arg=--gres=gpu:a100:4", "-n", "train.py",
    ],
    "--export for a Slurm job": ["--submit", "slurm", "--export", "HOME", "train.py"],
    "a job on different nodes": [
        "--submit", "slurm", "--mesh", "12", "--nnodes", "2", "--nproc-per-node", "8,4", "train.py",
    ],
    "a job that names its hosts": ["--submit", "slurm", "--hosts", "a:8,b:8", "train.py"],
    "a job as a picture": ["--submit", "slurm", "-n", "--format", "svg", "train.py"],
    "a conflicting number of nodes": [
        "--submit", "slurm", "--nnodes", "2", "--submit-arg=-N4", "-n", "train.py",
    ],
    "no sbatch option": ["--submit", "slurm", "--submit-arg=partition=gpu", "-n", "train.py"],
    "an unclosed quote for kubectl": [
        "--submit", "kubernetes", "--image", "a", "--nnodes", "1", "--nproc-per-node", "1",
        "--submit-arg=--namespace='x", "train.py",
    ],
    "a device that Kubernetes has no name for": [
        "--submit", "kubernetes", "--image", "a", "--device", "mps", "-n", "train.py",
    ],
    "no such file": ["nonexistent.py"],
    "no such module": ["-m", "nonexistent_module"],
    "no such preload": ["--preload", "numppy", "empty.py"],
}  # fmt: skip

PAGES: dict[str, list[str]] = {
    "help": ["--help"],
    "help-brief": ["-h"],
    "help-topic": ["--help", "logs"],
    "help-option": ["--mesh", "2", "--help", "nnodes"],
    "dry-run-2x4": ["--mesh", "2x4", "--names", "dp,tp", "--dry-run", "train.py", "--lr", "1e-3"],
    "dry-run-two-nodes": [
        "--mesh", "tp=4,dp=2", "--nnodes", "2", "--device", "cuda", "--dry-run", "train.py",
    ],
    "dry-run-three-dims": ["--mesh", "pp=2,dp=2,tp=2", "--nnodes", "2", "-n", "-m", "train"],
    "dry-run-placed": [
        "--mesh", "tp=4,dp=2", "--nnodes", "2", "--intra-node", "tp", "--place", "auto", "-n",
        "train.py",
    ],
    "dry-run-derived": [
        "--mesh", "dp=2:8,cp=1,tp=3", "--nproc-per-node", "8,4", "--intra-node", "tp",
        "--flatten", "dp_cp=dp+cp", "--view", "moe:efsdp=-1,ep=3", "-n", "train.py",
    ],
    "dry-run-one-rank": ["--mesh", "dp=2,tp=4", "--nnodes", "2", "--rank", "5", "-n", "train.py"],
    "dry-run-hosts": ["--hosts", "a:2,ada@b:2", "--mesh", "dp=2,tp=2", "--dry-run", "train.py"],
    "dry-run-16384": ["--mesh", "dp=2048,tp=8", "--nnodes", "2048", "--dry-run", "train.py"],
    "dry-run-no-mesh": ["--nproc-per-node", "2", "--dry-run", "train.py"],
    "dry-run-unnamed": ["--mesh", "2x2", "--dry-run", "train.py"],
}  # fmt: skip


_LAUNCH = ["--nnodes", "4", "--mesh", "dp=4,tp=8", "--device", "cuda"]
_IMAGE = ["--image", "hub/train:3", "--rdzv-id", "train"]
_PROGRAM = ["train.py", "--note", "it's $HOME"]
_PATCH = """\
metadata:
  labels: {kueue.x-k8s.io/queue-name: research}
---
kind: Pod
spec:
  tolerations: [{key: nvidia.com/gpu, operator: Exists}]
  containers:
    - name: meshrun
      resources: {limits: {rdma/hca: 8, memory: 900Gi}}
      securityContext: {capabilities: {add: [IPC_LOCK]}}
      volumeMounts: [{name: data, mountPath: /data}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
"""
JOBS: dict[str, list[str]] = {
    "submit-slurm.sh": [
        "--submit", "slurm", *_LAUNCH, "--shutdown-timeout", "120",
        "--submit-arg=--partition=gpu", "--submit-arg=-t 4:00:00 -A vision",
    ],
    "submit-slurm-own-choice.sh": [
        "--submit", "slurm", "--nnodes", "2", "--mesh", "dp=2,tp=4", "--device", "cpu",
        "--submit-arg=--exclusive", "--submit-arg=--no-requeue --output=logs/%j.txt",
    ],
    "submit-slurm-elastic.sh": [
        "--submit", "slurm", "--nnodes", "2:8", "--mesh", "dp=1:64", "--nproc-per-node", "8",
        "--image", "nvcr.io#nvidia/pytorch:1", "--submit-arg",
        "--array=0-3 --container-mounts=/data:/data",
    ],
    "submit-kubernetes.yaml": [
        "--submit", "kubernetes", *_LAUNCH, *_IMAGE, "--metrics", "0.0.0.0:9400",
    ],
    "submit-kubernetes-elastic.yaml": [
        "--submit", "kubernetes", "--nnodes", "2:4", "--mesh", "dp=1:32", "--nproc-per-node", "8",
        *_IMAGE, "--submit-patch", "patch.yaml", "--export", "HF_*",
    ],
    "submit-jobset.yaml": ["--submit", "jobset", *_LAUNCH, *_IMAGE],
    "submit-trainjob.yaml": ["--submit", "trainjob", *_LAUNCH, *_IMAGE],
    "submit-leaderworkerset.yaml": ["--submit", "leaderworkerset", *_LAUNCH, *_IMAGE],
}  # fmt: skip


def compare(name: str, found: str) -> None:
    """Compare ``found`` with the golden file, after writing it if UPDATE_GOLDEN is set."""
    file = HERE / name
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(found)
    assert found == file.read_text()


def shown(args: list[str]) -> str:
    """Return a command line without this machine's paths."""
    return " ".join(args).replace(sys.executable, "/usr/bin/python3")


def strip(text: str, folder: Path) -> str:
    """Replace whatever differs between machines."""
    text = text.replace(str(folder), "[FOLDER]")
    text = re.sub(r"OMP_NUM_THREADS=\d+", "OMP_NUM_THREADS=[THREADS]", text)
    text = re.sub(r"/\S*/python[\d.]*:", "python:", text)
    text = text.replace(sys.executable, "/usr/bin/python3")
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, fake_torch: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with programs that are never run."""
    for name in ("train.py", "empty.py"):
        (tmp_path / name).write_text("print('this program was run')\n")
    (tmp_path / "gone.py").symlink_to("train_old.py")
    (tmp_path / "run.sh").write_text("#!/bin/bash\necho hello\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.mark.timeout(300)  # many commands, one after the other
def test_each_error_reads_like_this(folder: Path) -> None:
    """Bad input starts nothing; one error says what was requested, what was found, what to try."""
    errors = []
    for (name, args), (code, out, err) in zip(
        ERRORS.items(), in_turn(ERRORS.values()), strict=True
    ):
        assert out == "", name
        assert code != 0, name
        errors.append(f"# {name}\n$ meshrun {shown(args)}\n{strip(err, folder)}"
                      f"exit code {code}\n")  # fmt: skip
    compare("errors.txt", "\n".join(errors))


def test_each_page_reads_like_this(folder: Path) -> None:
    """A page of output on a terminal with 80 columns."""
    for name, (code, out, err) in zip(PAGES, in_turn(PAGES.values()), strict=True):
        assert (code, err) == (0, ""), name
        compare(f"{name}.txt", strip(out, folder))
        assert max(len(line) for line in out.splitlines() if "https://" not in line) <= 80, name


def test_each_job_reads_like_this(folder: Path) -> None:
    """What a scheduler is given, for people to read and keep."""
    (folder / "patch.yaml").write_text(_PATCH)
    commands = [[*words, "--dry-run", *_PROGRAM] for words in JOBS.values()]
    ours = in_turn(commands, HF_TOKEN="hf_secret", HF_HOME="/data/$cache")
    for name, (code, out, err) in zip(JOBS, ours, strict=True):
        assert (code, err) == (0, ""), name
        job = out.replace(str(folder), "/home/me/run").replace(
            f"{sys.executable} {Path(meshrun.__file__).parent}/", "python /home/me/meshrun/"
        )
        compare(name, job)
        assert max(len(line) for line in job.splitlines()) <= 100, name


def test_a_plan_in_json_reads_like_this(folder: Path) -> None:
    """The machine-readable plan, whose schema is documented."""
    ours = run_meshrun("--mesh", "dp=2,tp=2", "--nnodes", "2", "-n", "--format", "json", "train.py")
    found = re.sub(r'"omp_num_threads": \d+', '"omp_num_threads": "[THREADS]"', ours.stdout)

    compare("dry-run.json", found)


def test_a_picture_of_a_plan_looks_like_this(folder: Path) -> None:
    """The picture of 2 x 4 ranks on a node."""
    ours = run_meshrun("--mesh", "dp=2,tp=4", "-n", "--format", "svg", "train.py")

    assert (ours.returncode, ours.stderr) == (0, "")
    compare("dry-run-2x4.svg", ours.stdout)


def test_all_prints_every_worker(folder: Path) -> None:
    """Even in a large plan, --all omits none."""
    ours = run_meshrun("--mesh", "dp=2048,tp=8", "--nnodes", "2048", "-n", "--all", "train.py")
    rows = [line.split() for line in ours.stdout.splitlines()[-16384:]]

    assert [row[0] for row in rows] == [str(rank) for rank in range(16384)]
    assert rows[-1] == ["16383", "2047", "7", "cpu", "2047", "7"]


@pytest.mark.parametrize("name", ["dry-run-2x4", "help"])
def test_a_dry_run_imports_no_torch(name: str, folder: Path, fake_torch: Path) -> None:
    run_meshrun(*PAGES[name])

    assert not fake_torch.exists()
