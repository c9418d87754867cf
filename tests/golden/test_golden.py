"""What people read, word for word. UPDATE_GOLDEN=1 regenerates the files."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import meshrun
from tests.kit import PROGRAMS, run_meshrun

HERE = Path(__file__).parent

ERRORS: dict[str, list[str]] = {
    "no program": [],
    "help on what there is not": ["--help", "lgos"],
    "help on nothing like it": ["--nproc-per-node", "2", "-h", "training"],
    "two words for one option": ["--mehs", "2x4", "train.py"],
    "a flag without its value": ["--mesh"],
    "a number that is none": ["--nproc-per-node", "many", "train.py"],
    "an empty mesh": ["--mesh", "", "train.py"],
    "a colon": ["--mesh", "dp:2", "train.py"],
    "a colon further on": ["--mesh", "dp=2,tp:4", "train.py"],
    "a name twice": ["--mesh", "dp=2,dp=4", "train.py"],
    "a size of zero": ["--mesh", "dp=2,tp=0", "train.py"],
    "a size below": ["--mesh", "dp=-2", "train.py"],
    "a size too large": ["--mesh", "dp=12345678901", "train.py"],
    "two sizes to infer": ["--mesh=-1x-1", "train.py"],
    "commas between sizes": ["--mesh", "2,4", "train.py"],
    "sizes in brackets": ["--mesh", "(2,4)", "train.py"],
    "names without sizes": ["--mesh", "dp,tp", "train.py"],
    "values of Python": ["--mesh", '{"dp": 2}', "train.py"],
    "dims with a space between": ["--mesh", "dp=2", "tp=4", "train.py"],
    "a dim without its option": ["dp=2", "train.py"],
    "a dim without a name": ["--mesh", "dp=2,4", "train.py"],
    "one dash": ["-mesh", "dp=2", "train.py"],
    "mpirun's option": ["-np", "2", "train.py"],
    "another launcher's option": ["--nprocs", "2", "train.py"],
    "a number after -n": ["-n", "2", "train.py"],
    "no name of a program": ["--mesh", "dp=2", ""],
    "an interpreter": ["--nproc-per-node", "2", "python", "train.py", "--lr", "1"],
    "a device type with a slip": ["--device", "cdua", "train.py"],
    "a device type of other launchers": ["--device", "gpu", "train.py"],
    "a back end with a slip": ["--mesh", "dp=2", "--backend", "goo", "train.py"],
    "a back end for another device": [
        "--mesh", "dp=2", "--device", "cpu", "--backend", "dp=nccl", "train.py",
    ],
    "a field that there is not": ["--log-line-prefix-template", "${rnk}: ", "train.py"],
    "a picture of a launch": ["--format", "svg", "train.py"],
    "a prompt on two nodes": ["--interactive", "--nnodes", "2"],
    "a prompt for a command": ["--interactive", "--no-python", "ls"],
    "a prompt and a debugger": ["--interactive", "--debug-rank", "1", "train.py"],
    "a prompt and restarts": ["--interactive", "--max-restarts", "1", "train.py"],
    "a prompt that is watched": ["--interactive", "--watch"],
    "two nodes that are watched": ["--watch", "--nnodes", "2", "train.py"],
    "one node and two": ["--standalone", "--nnodes", "2", "train.py"],
    "two ways to say what stands before lines": ["--prefix", "mesh", "--no-prefix", "train.py"],
    "a link that leads nowhere": ["gone.py"],
    "a binary program": [sys.executable, "train.py"],
    "a program for a shell": ["run.sh"],
    "a program without its ending": ["train"],
    "options after what a check is": ["--check", "--mesh", "dp=2", "quick", "--device", "cpu"],
    "a size that is none": ["--mesh", "dp=two", "train.py"],
    "a size that is missing": ["--mesh", "2x", "train.py"],
    "a dim that is missing": ["--mesh", "dp=2,", "train.py"],
    "a dim without a size": ["--mesh", "dp=2,tp", "train.py"],
    "too few names": ["--mesh", "2x4", "--names", "dp", "train.py"],
    "too many names": ["--mesh", "2", "--names", "dp,tp", "train.py"],
    "a name that torch would refuse": ["--mesh", "2x4", "--names", "dp,dp", "train.py"],
    "a name that is none": ["--mesh", "2x4", "--names", "dp,2nd", "train.py"],
    "names twice": ["--mesh", "dp=2,tp=4", "--names", "dp,tp", "train.py"],
    "names without a mesh": ["--names", "dp,tp", "train.py"],
    "a mesh that is too large": ["--mesh", "2x4", "--nproc-per-node", "6", "train.py"],
    "a mesh that is too small": ["--mesh", "dp=2,tp=2", "--nproc-per-node", "8", "train.py"],
    "a mesh that fits no node": ["--mesh", "2x4", "--nnodes", "3", "train.py"],
    "a mesh that is too large for two": [
        "--mesh", "dp=2,tp=4", "--nnodes", "2", "--nproc-per-node", "3", "--dry-run", "train.py",
    ],
    "a size that cannot be inferred": ["--mesh", "dp=-1,tp=8", "--nproc-per-node", "6", "train.py"],
    "nothing to infer from": ["--mesh", "dp=-1", "train.py"],
    "no workers": ["--nproc-per-node", "0", "train.py"],
    "no nodes": ["--mesh", "2", "--nnodes", "0", "train.py"],
    "too many ranks": ["--mesh", "100000x1000", "train.py"],
    "a device with an index": ["--mesh", "2", "--device", "cuda:0", "train.py"],
    "a device that is not here": ["--mesh", "2", "--device", "cuda", "train.py"],
    "a time below zero": ["--shutdown-timeout", "-1", "train.py"],
    "a reversed range": ["--mesh", "dp=8:2", "train.py"],
    "a range that needs more": ["--mesh", "dp=4:8,tp=4", "--nproc-per-node", "8", "train.py"],
    "two open sizes": ["--mesh", "dp=-1,tp=2:4", "train.py"],
    "nodes that differ, too few numbers": [
        "--mesh", "12", "--nnodes", "3", "--nproc-per-node", "8,4", "train.py",
    ],
    "hosts that cannot be read": ["--hosts", "a,b:x", "train.py"],
    "a host twice": ["--hosts", "a,b,a", "train.py"],
    "a hostfile that is not there": ["--hostfile", "nowhere", "train.py"],
    "a host that is not there": ["--hosts", "a:2,b:2", "--include", "c", "train.py"],
    "a choice of no hosts": ["--include", "a", "train.py"],
    "hosts and their number": ["--hosts", "a,b", "--nnodes", "3", "train.py"],
    "hosts and a node rank": ["--hosts", "a,b", "--node-rank", "1", "train.py"],
    "slots of some hosts": ["--hosts", "a:8,b", "train.py"],
    "slots that do not fit": ["--hosts", "a:4,b:4", "--mesh", "dp=3,tp=4", "train.py"],
    "a variable that is not set": ["--hosts", "a,b", "--export", "NOT_SET", "train.py"],
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
    "a dim to keep together that is not there": [
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
    "domains that are not known": [
        "--mesh", "dp=4,tp=8", "--nnodes", "8", "--intra-domain", "tp", "train.py",
    ],
    "a dim to keep in a domain that is not there": [
        "--mesh", "dp=4,tp=8", "--nnodes", "8", "--domain-size", "4", "--intra-domain", "pp",
        "train.py",
    ],
    "a dim to keep in a domain twice": [
        "--mesh", "dp=4,tp=8", "--nnodes", "8", "--domain-size", "4", "--intra-domain", "tp,tp",
        "train.py",
    ],
    "domains of no node": ["--mesh", "8", "--nnodes", "8", "--domain-size", "0", "train.py"],
    "domains of more nodes than there are": [
        "--mesh", "8", "--nnodes", "8", "--domain-size", "18", "train.py",
    ],
    "a domain for dims without a mesh": [
        "--nnodes", "8", "--domain-size", "4", "--intra-domain", "tp", "train.py",
    ],
    "places without dims": ["--mesh", "dp=2,tp=2", "--place", "auto", "train.py"],
    "a dim to join that is not there": ["--mesh", "dp=2,tp=2", "--flatten", "dp+cp", "train.py"],
    "a view that does not fit": ["--mesh", "dp=2,tp=2", "--view", "moe:ep=3", "train.py"],
    "a view with other groups": ["--mesh", "dp=2,tp=4", "--view", "moe:tp=2,ep=4", "train.py"],
    "ranks to show of no dim": ["--mesh", "dp=2", "--show", "pp=0", "train.py"],
    "ranks to hide of no dim": ["--mesh", "dp=2", "--hide", "1", "train.py"],
    "a rank to debug without an index": ["--mesh", "dp=2", "--debug-rank", "dp", "train.py"],
    "a time for no warm server": ["--warm-idle", "5m", "train.py"],
    "a color for no picture": ["-n", "--mesh", "dp=2", "--color-dim", "dp", "train.py"],
    "a view without a mesh": ["--view", "moe:ep=3", "train.py"],
    "a rank that is not there": ["--mesh", "2", "--rank", "2", "--dry-run", "train.py"],
    "a rank that is several": ["--mesh", "dp=2,tp=2", "--rank", "dp=1", "--dry-run", "train.py"],
    "a rank without a dry run": ["--mesh", "2", "--rank", "1", "train.py"],
    "static nodes, more or fewer": ["--mesh", "4", "--nnodes", "2:4", "train.py"],
    "a node that knows no other": [
        "--mesh", "4", "--nnodes", "2", "--node-rank", "1", "train.py",
    ],
    "a range of nodes with three ends": ["--mesh", "4", "--nnodes", "2:20:30", "train.py"],
    "a console of no node": ["--mesh", "4", "--console", "some", "train.py"],
    "a dry run with a rank to debug that there is not": [
        "--mesh", "4", "--dry-run", "--debug-rank", "9", "train.py",
    ],
    "a scheduler that is none": ["--submit", "slrum", "train.py"],
    "a job without an image": ["--submit", "kubernetes", "--nnodes", "2", "train.py"],
    "an image without a job": ["--image", "torch", "train.py"],
    "a job that knows its node": ["--submit", "slurm", "--node-rank", "1", "train.py"],
    "a job that knows where": [
        "--submit", "slurm", "--nnodes", "2", "--rdzv-endpoint", "node1:29500", "train.py",
    ],
    "a job on as many cores as this machine has": [
        "--submit", "slurm", "--nnodes", "2", "--nproc-per-node", "auto", "train.py",
    ],
    "a job on two or more nodes": [
        "--submit", "trainjob", "--image", "a", "--nnodes", "2:4", "train.py",
    ],
    "a patch of a script": ["--submit", "slurm", "--submit-patch", "p.yaml", "train.py"],
    "a patch that is not there": [
        "--submit", "kubernetes", "--image", "a", "--submit-patch", "p.yaml", "train.py",
    ],
    "fewer GPUs than workers": [
        "--submit", "slurm", "--nnodes", "2", "--nproc-per-node", "8", "--device", "cuda",
        "--submit-arg=--gres=gpu:a100:4", "-n", "train.py",
    ],
    "a variable of a job that has all": ["--submit", "slurm", "--export", "HOME", "train.py"],
    "a job on nodes that differ": [
        "--submit", "slurm", "--mesh", "12", "--nnodes", "2", "--nproc-per-node", "8,4", "train.py",
    ],
    "a job that names its hosts": ["--submit", "slurm", "--hosts", "a:8,b:8", "train.py"],
    "a job as a picture": ["--submit", "slurm", "-n", "--format", "svg", "train.py"],
    "another number of nodes": [
        "--submit", "slurm", "--nnodes", "2", "--submit-arg=-N4", "-n", "train.py",
    ],
    "no option of sbatch": ["--submit", "slurm", "--submit-arg=partition=gpu", "-n", "train.py"],
    "quotation of kubectl": [
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
    """Hold ``found`` against the golden file, or write it."""
    file = HERE / name
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(found)
    assert found == file.read_text()


def shown(args: list[str]) -> str:
    """Return a command line without the paths of this machine."""
    return " ".join(args).replace(sys.executable, "/usr/bin/python3")


def strip(text: str, folder: Path) -> str:
    """Take out what differs from machine to machine."""
    text = text.replace(str(folder), "[FOLDER]")
    text = re.sub(r"OMP_NUM_THREADS=\d+", "OMP_NUM_THREADS=[THREADS]", text)
    text = re.sub(r"/\S*/python[\d.]*:", "python:", text)
    text = text.replace(sys.executable, "/usr/bin/python3")
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, fake_torch: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a program that is never run."""
    for name in ("train.py", "empty.py"):
        (tmp_path / name).write_text("print('this program was run')\n")
    (tmp_path / "gone.py").symlink_to("train_old.py")
    (tmp_path / "run.sh").write_text("#!/bin/bash\necho hello\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.mark.timeout(300)  # many commands, one after the other
def test_every_error(folder: Path) -> None:
    """Bad input starts nothing, and one error says what was asked, what was found, what to try."""
    ours = subprocess.run(
        [sys.executable, PROGRAMS / "in_turn.py"],
        input=json.dumps(list(ERRORS.values())), capture_output=True, text=True, check=True,
    )  # fmt: skip
    told = []
    for (name, args), (code, out, err) in zip(ERRORS.items(), json.loads(ours.stdout), strict=True):
        assert out == "", name
        assert code != 0, name
        told.append(f"# {name}\n$ meshrun {shown(args)}\n{strip(err, folder)}"
                    f"exit code {code}\n")  # fmt: skip
    compare("errors.txt", "\n".join(told))


@pytest.mark.parametrize("name", PAGES)
def test_page(name: str, folder: Path) -> None:
    """A page of output as a person sees it at 80 columns."""
    ours = run_meshrun(*PAGES[name])

    assert (ours.returncode, ours.stderr) == (0, "")
    compare(f"{name}.txt", strip(ours.stdout, folder))
    assert max(len(line) for line in ours.stdout.splitlines() if "https://" not in line) <= 80


@pytest.mark.parametrize("name", JOBS)
def test_job(name: str, folder: Path) -> None:
    """What is handed to a scheduler, for people to read and keep."""
    (folder / "patch.yaml").write_text(_PATCH)
    variables = {"HF_TOKEN": "hf_secret", "HF_HOME": "/data/$cache"}
    ours = run_meshrun(*JOBS[name], "--dry-run", *_PROGRAM, env=variables)

    assert (ours.returncode, ours.stderr) == (0, "")
    told = ours.stdout.replace(str(folder), "/home/me/run").replace(
        f"{sys.executable} {Path(meshrun.__file__).parent}/", "python /home/me/meshrun/"
    )
    compare(name, told)
    assert max(len(line) for line in told.splitlines()) <= 100


def test_plan_as_json(folder: Path) -> None:
    """The machine-readable plan, whose schema is documented."""
    ours = run_meshrun("--mesh", "dp=2,tp=2", "--nnodes", "2", "-n", "--format", "json", "train.py")
    found = re.sub(r'"omp_num_threads": \d+', '"omp_num_threads": "[THREADS]"', ours.stdout)

    compare("dry-run.json", found)


def test_plan_as_a_picture(folder: Path) -> None:
    """The picture that is drawn for 2 x 4 ranks on a node."""
    ours = run_meshrun("--mesh", "dp=2,tp=4", "-n", "--format", "svg", "train.py")

    assert (ours.returncode, ours.stderr) == (0, "")
    compare("dry-run-2x4.svg", ours.stdout)


def test_all_prints_every_worker(folder: Path) -> None:
    """--all leaves nobody out of a large plan."""
    ours = run_meshrun("--mesh", "dp=2048,tp=8", "--nnodes", "2048", "-n", "--all", "train.py")
    rows = [line.split() for line in ours.stdout.splitlines()[-16384:]]

    assert [row[0] for row in rows] == [str(rank) for rank in range(16384)]
    assert rows[-1] == ["16383", "2047", "7", "cpu", "2047", "7"]


@pytest.mark.parametrize("name", ["dry-run-2x4", "help"])
def test_a_dry_run_imports_no_torch(name: str, folder: Path, fake_torch: Path) -> None:
    """Looking costs nothing."""
    run_meshrun(*PAGES[name])

    assert not fake_torch.exists()
