"""Scripts and manifests of jobs: every argument arrives as it was typed, and they are valid."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from meshrun.cli.options import Options
from meshrun.cli.submit import words_again
from meshrun.errors import UsageError
from meshrun.host.machine import UNKNOWN_HOST
from meshrun.layout.spec import parse_mesh
from meshrun.plan.plan import build_plan
from meshrun.plan.request import LaunchRequest, Program
from meshrun.submit.job import Job, job_name
from meshrun.submit.manifests import KINDS, render_manifest, render_rest
from meshrun.submit.sbatch import option_names, output_of, render_sbatch
from meshrun.submit.yaml import quote

WORDS = st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
NAMES = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def make_job(*args: str, extras: tuple[str, ...] = (), **changes: Any) -> Job:
    request = LaunchRequest(
        program=Program(kind="script", target="train.py", args=args),
        mesh=parse_mesh("dp=2,tp=4"),
        nnodes=2,
        **changes,
    )
    return Job(
        plan=build_plan(request, UNKNOWN_HOST, check_host=False),
        name="train",
        options=(("--mesh", "dp=2,tp=4"), ("--nnodes", "2")),
        program=("train.py", *args),
        extras=extras,
        accelerators=4,
        image="hub/train:3",
    )


def expand(word: str) -> str:
    """Return what a container gets for a word of its command, with HOME set."""
    return re.sub(r"\$(\$|\(HOME\))", lambda found: "$" if found[1] == "$" else "/root", word)


def containers(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what has a command, wherever it is."""
    found: list[dict[str, Any]] = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            found.extend([value] if "command" in value else [])
            value = list(value.values())
        if isinstance(value, list):
            for each in value:
                look(each)

    look(documents)
    return found


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_text_is_the_same_in_yaml(text: str) -> None:
    """Whatever is in it."""
    assert yaml.safe_load(f"- {quote(text)}") == [text]


@pytest.mark.parametrize("kind", KINDS)
@given(words=WORDS)
def test_words_are_the_same_in_a_container(kind: str, words: list[str]) -> None:
    """After YAML, and after Kubernetes has filled in variables."""
    job = make_job(*words, "$(HOME)", "$$(HOME)", "$")
    documents = list(yaml.safe_load_all(render_manifest(job, kind)))
    (container,) = containers(documents)
    typed = ["--mesh", "dp=2,tp=4", "--nnodes", "2", "train.py", *job.program[1:]]
    found = [expand(word) for word in container["command"]]

    assert found[0] == "meshrun"
    assert found[-len(typed) :] == typed


def test_words_are_the_same_in_a_script(tmp_path: Path) -> None:
    """After bash, in folders with awkward names too."""
    odd = [" ", "", "it's", '"', "$HOME", "`date`", "\\", "#", "a\nb", "*", "!x", "é", "-", "--"]
    folder = "/it's a $folder"
    script = render_sbatch(
        make_job(*odd), launcher=["/my python", "/at it/start.py"], folder=folder
    )
    (tmp_path / "srun").write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    (tmp_path / "srun").chmod(0o755)
    ran = subprocess.run(
        ["bash"], input=script, capture_output=True, text=True, check=False,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_CPUS_PER_TASK": "16"},
    )  # fmt: skip
    words = ran.stdout.split("\0")[:-1]

    assert words[words.index("/my python") :] == [
        "/my python", "/at it/start.py", "--mesh", "dp=2,tp=4", "--nnodes", "2", "train.py", *odd,
    ]  # fmt: skip
    assert "--cpus-per-task=16" in words
    assert ran.returncode == 0, ran.stderr


def test_each_run_of_a_job_draws_a_secret(tmp_path: Path) -> None:
    """And the script holds none."""
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf %s "$MESHRUN_SECRET"\n')
    (tmp_path / "srun").chmod(0o755)
    script = render_sbatch(make_job(), launcher=["python"], folder="/")
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_CPUS_PER_TASK": "1"}
    run = ["bash"]
    secrets = [
        subprocess.run(
            run, input=script, capture_output=True, text=True, check=True, env=env
        ).stdout
        for _ in range(2)
    ]

    assert all(re.fullmatch("[0-9a-f]{64}", secret) for secret in secrets)
    assert secrets[0] != secrets[1]


@pytest.mark.parametrize(
    ("code", "restarts", "asked"),
    [(0, "", 0), (75, "", 1), (143, "", 0), (75, "40", 1), (69, "", 1), (69, "9", 1),
     (69, "10", 0), (1, "", 0)],
)  # fmt: skip
def test_a_job_that_was_preempted_or_lost_a_node_is_requeued(
    tmp_path: Path, code: int, restarts: str, asked: int
) -> None:
    """By the exit code of srun, which is the job's otherwise; what may fail each time, 10 times."""
    for name, text in {"srun": f"exit {code}", "scontrol": 'echo "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = render_sbatch(make_job(), launcher=["python"], folder="/")
    ran = subprocess.run(
        ["bash"], input=script, capture_output=True, text=True, check=False,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1",
             "SLURM_RESTART_COUNT": restarts},
    )  # fmt: skip

    assert ran.stdout == "requeue 7\n" * asked
    assert ran.returncode == (0 if asked else code)


@pytest.mark.parametrize(
    ("extra", "gone"),
    [
        ("--gres=gpu:a100:4", "--gpus-per-node"),
        ("-G 8", "--gpus-per-node"),
        ("-c16", "--cpus-per-task"),
        ("--signal=INT@300", "--signal=TERM"),
        ("-p gpu --job-name other", "--job-name=train"),
        ("-omine.txt", "--output=%x"),
    ],
)
def test_what_the_user_says_to_sbatch_counts(extra: str, gone: str) -> None:
    """In whatever spelling, and ours is left out."""
    ours = render_sbatch(make_job(), launcher=["python"], folder="/")
    theirs = render_sbatch(make_job(extras=(extra,)), launcher=["python"], folder="/")

    assert f"#SBATCH {gone}" in ours
    assert f"#SBATCH {gone}" not in theirs
    assert f"#SBATCH {extra}\n" in theirs


@pytest.mark.parametrize("extra", ["--nodes=4", "-N 4", "-n8", "gpu", "-p 'gpu", "--comment=a\nb"])
def test_what_contradicts_the_plan_is_refused(extra: str) -> None:
    """As is what sbatch could not read."""
    with pytest.raises(UsageError, match="--submit-arg"):
        render_sbatch(make_job(extras=(extra,)), launcher=["python"], folder="/")


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("B:TERM@60", "hint: use --signal=TERM@60"),
        ("RB:USR1@60", "hint: use --signal=USR1@60"),
        ("USR1@60", "hint: add --forward USR1"),
        ("R:SIGUSR1", "hint: add --forward USR1"),
        (str(int(signal.SIGUSR2)), "hint: add --forward USR2"),
    ],
)
def test_a_signal_that_would_end_the_job_is_refused(asked: str, found: str) -> None:
    """By itself, or with the shell of the script; one that is passed on is fine."""
    for extra in (f"--signal={asked}", f"--signal {asked}"):
        with pytest.raises(UsageError) as refused:
            render_sbatch(make_job(extras=(extra,)), launcher=["python"], folder="/")
        assert f"hint: {refused.value.hint}".startswith(found)
    forwards = (signal.SIGUSR1, signal.SIGUSR2)
    for passed in ("TERM@60", "R:HUP", "USR1@60", "SIGUSR2", "CONT"):
        job = make_job(extras=(f"--signal={passed}",), forwarded_signals=forwards)
        assert f"--signal={passed}\n" in render_sbatch(job, launcher=["python"], folder="/")


def test_output_is_where_the_user_says() -> None:
    """As far as the pattern can be told."""
    folder = "/home/me"

    assert output_of("7", make_job(), folder) == "/home/me/train-7.out"
    assert output_of("7", make_job(extras=("-o /logs/%j.txt",)), folder) == "/logs/7.txt"
    assert output_of("7", make_job(extras=("-omine",)), folder) == "/home/me/mine"
    assert output_of("7", make_job(extras=("--output=a/%x",)), folder) == "/home/me/a/train"
    assert option_names(["-p gpu -o x", "--time=1"]) == {"-p", "--output", "--time"}


def test_options_are_said_again_wherever_they_came_from() -> None:
    """Those of variables too, and none that is of the submission."""
    values = {
        "mesh": "-1", "flatten": ("a=b+c", "d+e"), "verbose": True, "tee": "3", "submit": "slurm",
        "image": "x", "timings": False, "module": True,
    }  # fmt: skip
    sources = dict.fromkeys(values, "command line") | {"tee": "PET_TEE", "timings": "X"}

    assert words_again(Options(values, sources, {})) == (
        ("--mesh=-1",), ("--flatten", "a=b+c"), ("--flatten", "d+e"), ("--verbose",),
        ("--tee", "3"),
    )  # fmt: skip


@given(st.text(), st.one_of(st.none(), st.text(min_size=1)))
def test_a_name_is_one_for_every_scheduler(target: str, run_id: str | None) -> None:
    """A label of DNS, with room for what is added."""
    name = job_name(run_id, target)

    assert NAMES.fullmatch(name)
    assert len(name) <= 44


def manifest(kind: str, **changes: Any) -> list[dict[str, Any]]:
    """Return the documents of a manifest, its Secret too."""
    job = make_job(**changes)
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "u"}
    text = render_manifest(job, kind) + "---\n" + render_rest(job, kind, "x", owner)
    return list(yaml.safe_load_all(text))


def policy_of(kind: str) -> list[dict[str, Any]]:
    """Return the rules by which the controller of a Job judges a pod that failed."""
    spec = next(each for each in manifest(kind) if each["kind"] in ("Job", "JobSet"))["spec"]
    for replicated in spec.get("replicatedJobs", []):
        spec = replicated["template"]["spec"]
    rules: list[dict[str, Any]] = spec["podFailurePolicy"]["rules"]
    return rules


@pytest.mark.parametrize("kind", ["kubernetes", "jobset"])
@pytest.mark.parametrize(
    ("code", "is_disrupted", "fails"),
    [
        (143, True, False), (143, False, False), (75, True, False), (75, False, False),
        (69, False, False), (137, True, False), (137, False, True), (1, False, True),
        (2, False, True),
    ],
    ids=["drained", "with one that was drained", "preempted", "with it", "lost a node",
         "drained and killed", "out of memory", "an exception", "a wrong command"],
)  # fmt: skip
def test_a_pod_that_was_drained_fails_no_job(
    kind: str, code: int, is_disrupted: bool, fails: bool
) -> None:
    """Nor do those of the other nodes, which end with it; by the first rule that fits."""
    action = "Count"
    for rule in reversed(policy_of(kind)):
        exits, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
        fits = conditions is not None and is_disrupted
        if exits is not None:
            fits = (code in exits["values"]) == (exits["operator"] == "In")
        action = rule["action"] if fits else action

    assert (action == "FailJob") == fails
    if kind == "kubernetes" and not fails and code != 69:
        assert action == "Ignore"  # however often it happens


@pytest.mark.parametrize("kind", KINDS)
def test_manifests_are_valid(kind: str) -> None:
    """Against the schemas of Kubernetes, misspelt fields too; a JobSet's Job by itself."""
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    documents = manifest(kind, shutdown_timeout_s=90.0)
    standard = [each for each in documents if each["apiVersion"] in ("v1", "batch/v1")]
    for document in documents:
        for replicated in document["spec"].get("replicatedJobs", []) if "spec" in document else []:
            name = {"metadata": {"name": "node"}}
            standard.append(
                {"apiVersion": "batch/v1", "kind": "Job", **name, **replicated["template"]}
            )
    for document in standard:
        validate.validate(document, "1.31", strict=True)

    assert {each["kind"] for each in standard} >= {
        "kubernetes": {"Service", "Job", "Secret"}, "jobset": {"Job", "Secret"},
        "trainjob": {"Secret"},
    }[kind]  # fmt: skip


MODELS = {"jobset": "JobsetV1alpha2JobSet", "trainjob": "TrainerV1alpha1TrainJob"}
"""The generated model of what each kind makes, by its API group and version."""


def is_valid(kind: str, document: dict[str, Any]) -> bool:
    """Whether a document fits its kind's own schema, and none of its fields is unknown there."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    try:
        read = getattr(models, MODELS[kind]).from_dict(document)
    except (ValueError, AttributeError):  # AttributeError: a text where an object has to be
        return False
    return bool(read.to_dict() == document)


def fields(value: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield every field below a value as the object that has it and its name."""
    for name, below in list(value.items() if isinstance(value, dict) else enumerate(value)):
        if isinstance(value, dict):
            yield value, name
        if isinstance(below, dict | list):
            yield from fields(below)


@pytest.mark.parametrize("kind", MODELS)
def test_custom_resources_fit_their_own_schemas(kind: str) -> None:
    """Every one of their fields is known there, and of the right type."""
    document = manifest(kind, shutdown_timeout_s=90.0)[0]
    group, _, version = document["apiVersion"].partition("/")

    assert is_valid(kind, document)
    model = f"{group.partition('.')[0]}{version}{document['kind']}"
    assert model.lower() == MODELS[kind].lower()


@pytest.mark.parametrize("kind", MODELS)
def test_a_field_that_is_wrong_does_not_fit(kind: str) -> None:
    """Misspelt, or of another type, wherever it stands; resources have names of their own."""
    document = manifest(kind)[0]
    tried = 0
    for parent, name in list(fields(document)):
        if "/" in name:
            continue
        value = parent.pop(name)
        parent[f"{name}s"] = value
        assert not is_valid(kind, document), f"{name}s"
        del parent[f"{name}s"]
        parent[name] = [value]
        assert not is_valid(kind, document), f"{name}: [...]"
        parent[name] = value
        tried += 1

    assert tried > 15
    assert is_valid(kind, document)
