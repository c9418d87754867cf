"""Scripts and manifests of jobs: they are valid, and every argument arrives as it was typed."""

from __future__ import annotations

import os
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
from meshrun.cli.submit_job import option_words
from meshrun.errors import UsageError
from meshrun.host.machine import UNKNOWN_HOST
from meshrun.layout.spec import parse_mesh
from meshrun.plan.plan import build_plan
from meshrun.plan.rank_program import Program
from meshrun.submit.documents import Patch, quote
from meshrun.submit.job import Job, job_name
from meshrun.submit.manifests import KINDS, render_manifest, render_rest, why_no_probes
from meshrun.submit.sbatch import options_in, output_of, render_sbatch
from tests.plans import meeting_of, request_of

WORDS = st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
NAMES = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def make_job(
    *args: str,
    extras: tuple[str, ...] = (),
    image: str | None = None,
    patches: tuple[Patch, ...] = (),
    exported: tuple[tuple[str, str], ...] = (),
    **changes: Any,
) -> Job:
    request = request_of(
        Program(kind="script", target="train.py", args=args),
        **{"mesh": parse_mesh("dp=2,tp=4"), "nnodes": 2, **changes},
    )
    return Job(
        plan=build_plan(request, UNKNOWN_HOST, check_host=False),
        name="train",
        options=(("--mesh", "dp=2,tp=4"), ("--nnodes", "2")),
        program=("train.py", *args),
        extras=extras,
        accelerators=4,
        image=image,
        patches=patches,
        exported=exported,
    )


ELASTIC = {
    "mesh": parse_mesh("dp=1:32"), "nnodes": 4, "nproc_per_node": 8,
    "rendezvous": meeting_of(backend="c10d", least_nodes=2),
}  # fmt: skip


def expand(word: str) -> str:
    """Return what Kubernetes makes of a word of a container's command, with HOME set."""
    return re.sub(r"\$(\$|\(HOME\))", lambda found: "$" if found[1] == "$" else "/root", word)


def containers(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the objects that have a command, at any depth."""
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
    """Whatever it contains."""
    assert yaml.safe_load(f"- {quote(text)}") == [text]


@pytest.mark.parametrize("kind", KINDS)
@given(words=WORDS)
def test_words_are_the_same_in_a_container(kind: str, words: list[str]) -> None:
    """After YAML, and after Kubernetes has expanded variables."""
    job = make_job(*words, "$(HOME)", "$$(HOME)", "$", image="a")
    documents = list(yaml.safe_load_all(render_manifest(job, kind)))
    (container,) = containers(documents)
    typed = ["--mesh", "dp=2,tp=4", "--nnodes", "2", "train.py", *job.program[1:]]
    found = [expand(word) for word in container["command"]]

    assert found[0] == "meshrun"
    assert found[-len(typed) :] == typed


def test_words_are_the_same_in_a_script(tmp_path: Path) -> None:
    """After bash, also in folders with awkward names."""
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
    """The script contains none."""
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
    ("code", "restarts", "requeues"),
    [(0, "", 0), (75, "", 1), (143, "", 0), (75, "40", 1), (69, "", 1), (69, "9", 1),
     (69, "10", 0), (1, "", 0), (78, "", 0)],
)  # fmt: skip
def test_a_job_that_was_preempted_or_lost_a_node_is_requeued(
    tmp_path: Path, code: int, restarts: str, requeues: int
) -> None:
    """srun's exit code decides, and is otherwise the job's; 10 times at most for a lost node."""
    for name, text in {"srun": f"exit {code}", "scontrol": 'echo "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = render_sbatch(make_job(), launcher=["python"], folder="/")
    ran = subprocess.run(
        ["bash"], input=script, capture_output=True, text=True, check=False,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1",
             "SLURM_RESTART_COUNT": restarts},
    )  # fmt: skip

    assert ran.stdout == "requeue 7\n" * requeues
    assert ran.returncode == (0 if requeues else code)


@pytest.mark.parametrize(
    ("extra", "replaced"),
    [
        ("--gres=gpu:a100:4", "--gpus-per-node"),
        ("-G 8", "--gpus-per-node"),
        ("-c16", "--cpus-per-task"),
        ("--signal=INT@300", "--signal=TERM"),
        ("-p gpu --job-name other", "--job-name=train"),
        ("-omine.txt", "--output=%x"),
    ],
)
def test_what_the_user_says_to_sbatch_takes_precedence(extra: str, replaced: str) -> None:
    """In any spelling; meshrun's own option is left out."""
    ours = render_sbatch(make_job(), launcher=["python"], folder="/")
    theirs = render_sbatch(make_job(extras=(extra,)), launcher=["python"], folder="/")

    assert f"#SBATCH {replaced}" in ours
    assert f"#SBATCH {replaced}" not in theirs
    assert f"#SBATCH {extra}\n" in theirs


@pytest.mark.parametrize(
    "extra",
    ["--nodes=4", "-N 4", "-n8", "--ntasks-per-gpu=1", "gpu", "-p 'gpu", "--comment=a\nb",
     "--gpus-per-node=2", "--gres=gpu:a100:2,nvme:1", "--gres=gpu", "-G7", "--gpus=a100:3,h100:3",
     "--gpus-per-task 1"],
)  # fmt: skip
def test_what_contradicts_the_plan_is_refused(extra: str) -> None:
    """As is what sbatch could not parse."""
    with pytest.raises(UsageError, match="--submit-arg"):
        render_sbatch(make_job(extras=(extra,)), launcher=["python"], folder="/")


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("B:TERM@60", "hint: use --signal=TERM@60"),
        ("RB:USR1@60", "hint: use --signal=USR1@60"),
        ("USR1@60", "hint: add --forward USR1"),
        ("R:SIGUSR1", "hint: add --forward USR1"),
        (str(int(signal.SIGUSR2)), "hint: add --forward USR2"),
    ],
)
def test_a_signal_that_would_end_the_job_is_refused(asked: str, hint: str) -> None:
    """It would end the launcher or the script's shell; one that is forwarded is fine."""
    for extra in (f"--signal={asked}", f"--signal {asked}"):
        with pytest.raises(UsageError) as refused:
            render_sbatch(make_job(extras=(extra,)), launcher=["python"], folder="/")
        assert f"hint: {refused.value.hint}".startswith(hint)
    forwards = (signal.SIGUSR1, signal.SIGUSR2)
    for passed in ("TERM@60", "R:HUP", "USR1@60", "SIGUSR2", "CONT"):
        job = make_job(extras=(f"--signal={passed}",), forwarded_signals=forwards)
        assert f"--signal={passed}\n" in render_sbatch(job, launcher=["python"], folder="/")


@pytest.mark.parametrize(
    "extra", ["--gres=gpu:a100:4", "-G8", "--gres=nvme:1", "--gpus-per-node=a100:2,h100:2",
              "--gpus-per-node=all", "--gres=gpu:a100:2(S:0)"],
)  # fmt: skip
def test_enough_gpus_or_an_unknown_number_are_the_users_choice(extra: str) -> None:
    """Only fewer GPUs than workers contradict the plan."""
    script = render_sbatch(make_job(extras=(extra,)), launcher=["python"], folder="/")

    assert f"#SBATCH {extra}\n" in script


@pytest.mark.parametrize(
    ("extras", "image", "rest", "srun"),
    [
        ((), "hub/train:3", "",
         "--container-image=hub/train:3 --container-mounts=/me --container-workdir=/me"),
        (("--container-image=a#b:1",), "hub/train:3", "",
         "--container-mounts=/me '--container-image=a#b:1' --container-workdir=/me"),
        (("-p gpu --container-image a --container-mounts '/a b:/b' -t 4",), None, "-p gpu -t 4",
         "--container-image a --container-mounts '/me,/a b:/b' --container-workdir=/me"),
        (("--chdir=/run --container-mounts=/a",), "b", "--chdir=/run",
         "--container-image=b --container-mounts=/run,/a --container-workdir=/run"),
        (("-D run",), "b", "-D run",
         "--container-image=b --container-mounts=/me/run --container-workdir=/me/run"),
        (("--container-workdir=/code",), "b", "", "--container-image=b --container-workdir=/code"),
        (("--container-image=a --no-container-mount-home", "--container-writable --mem 0"), None,
         "--mem 0", "--container-mounts=/me --container-image=a --no-container-mount-home"
         " --container-writable --container-workdir=/me"),
        (("--container=/bundle",), None, "", "--container=/bundle"),
    ],
)  # fmt: skip
def test_a_container_is_around_the_launcher(
    extras: tuple[str, ...], image: str | None, rest: str, srun: str
) -> None:
    """Not around the script, which calls srun; it runs the image's meshrun.

    The working directory is the job's folder, unless the user sets another.
    """
    job = make_job(extras=extras, image=image)
    script = render_sbatch(job, launcher=["/my/python", "start.py"], folder="/me")
    directives = [line for line in script.splitlines() if line.startswith("#SBATCH")]

    assert f" {srun} meshrun " in script.replace(" \\\n    ", " ")
    assert not any("container" in line for line in directives)
    assert not rest or f"#SBATCH {rest}" in directives


def test_a_folder_that_pyxis_cannot_mount() -> None:
    """Its name has a comma, which separates mounts; with another working directory it need not."""
    with pytest.raises(UsageError, match="cannot mount `/my,self`"):
        render_sbatch(make_job(image="a"), launcher=["meshrun"], folder="/my,self")
    job = make_job(image="a", extras=("--container-workdir=/code",))

    assert "--container-mounts" not in render_sbatch(job, launcher=["meshrun"], folder="/my,self")


@pytest.mark.parametrize("folder", ["/100%", "/back\\slash"])
def test_a_folder_that_slurm_would_misread_is_an_error(folder: str) -> None:
    """The job would start or write its output elsewhere, unless the user says where."""
    with pytest.raises(UsageError, match=r"`%` and .* special meaning"):
        render_sbatch(make_job(), launcher=["meshrun"], folder=folder)

    assert render_sbatch(make_job(extras=("-D /runs",)), launcher=["meshrun"], folder=folder)


def test_mounts_alone_are_no_container() -> None:
    """The site may have a default container, so options for it still go to srun."""
    job = make_job(extras=("--container-mounts=/a:/b",))
    script = render_sbatch(job, launcher=["/my/python"], folder="/")

    assert "    --container-mounts=/a:/b \\\n    /my/python \\\n" in script


def test_output_is_where_the_user_says() -> None:
    """As far as the pattern can be expanded."""
    folder = "/home/me"

    assert output_of("7", make_job(), folder) == "/home/me/train-7.out"
    assert output_of("7", make_job(extras=("-o /logs/%j.txt",)), folder) == "/logs/7.txt"
    assert output_of("7", make_job(extras=("-omine",)), folder) == "/home/me/mine"
    assert output_of("7", make_job(extras=("-a 1-3",)), folder) == "/home/me/train-7_%a.out"
    assert output_of("7", make_job(extras=("--output=a/%x",)), folder) == "/home/me/a/train"
    assert output_of("7", make_job(extras=("-D runs",)), folder) == "/home/me/runs/train-7.out"
    assert output_of("7", make_job(extras=("-D /runs",)), folder) == "/runs/train-7.out"
    found = options_in(["-p gpu -o x", "", "--time=1"])
    assert found == {"-p": "gpu", "--output": "x", "--time": "1"}


def test_options_are_repeated_wherever_they_came_from() -> None:
    """Also from variables; options of the submission are not repeated."""
    values = {
        "mesh": "-1", "flatten": ("a=b+c", "d+e"), "verbose": True, "tee": "3", "submit": "slurm",
        "image": "x", "timings": False, "module": True,
    }  # fmt: skip
    sources = dict.fromkeys(values, "command line") | {"tee": "PET_TEE", "timings": "X"}

    assert option_words(Options(values, sources, {})) == (
        ("--mesh=-1",), ("--flatten", "a=b+c"), ("--flatten", "d+e"), ("--verbose",),
        ("--tee", "3"),
    )  # fmt: skip


@given(st.text(), st.one_of(st.none(), st.text(min_size=1)))
def test_a_name_is_valid_for_every_scheduler(target: str, run_id: str | None) -> None:
    """It is a DNS label, with room for suffixes."""
    name = job_name(run_id, target, suffix="0a1b2c")

    assert NAMES.fullmatch(name)
    assert len(f"{name}-node-0-99999-abcde") <= 63  # a pod of a JobSet
    assert name.endswith("-0a1b2c") or run_id


def manifest(kind: str, **changes: Any) -> list[dict[str, Any]]:
    """Return the documents of a manifest, including its Secret."""
    job = make_job(**changes, image="hub/train:3")
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "u"}
    text = render_manifest(job, kind) + "---\n" + render_rest(job, kind, "x", owner)
    return list(yaml.safe_load_all(text))


def policy_of(kind: str, **changes: Any) -> list[dict[str, Any]]:
    """Return the rules by which a Job's controller judges a failed pod."""
    documents = manifest(kind, **changes)
    spec = next(each for each in documents if each["kind"] in ("Job", "JobSet"))["spec"]
    for replicated in spec.get("replicatedJobs", []):
        spec = replicated["template"]["spec"]
    rules: list[dict[str, Any]] = spec["podFailurePolicy"]["rules"]
    return rules


@pytest.mark.parametrize("kind", ["kubernetes", "jobset", "elastic", "elastic jobset"])
@pytest.mark.parametrize(
    ("code", "is_disrupted", "fails"),
    [
        (143, True, False), (143, False, False), (75, True, False), (75, False, False),
        (69, False, False), (137, True, False), (137, False, True), (1, False, True),
        (2, False, True), (78, False, True),
    ],
    ids=["drained", "beside a drained one", "preempted", "beside a preempted one", "lost a node",
         "drained and killed", "out of memory", "an exception", "a wrong command", "excluded"],
)  # fmt: skip
def test_a_pod_that_was_drained_fails_no_job(
    kind: str, code: int, is_disrupted: bool, fails: bool
) -> None:
    """Nor do those of the other nodes, which end with it; the first rule that fits decides."""
    is_elastic = kind not in KINDS
    name, changes = VARIATIONS[kind]
    rules = policy_of(name, **changes)
    action = "Count"
    for rule in reversed(rules):
        exits, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
        fits = conditions is not None and is_disrupted
        if exits is not None:
            fits = (code in exits["values"]) == (exits["operator"] == "In")
        action = rule["action"] if fits else action

    assert (action == ("FailIndex" if is_elastic else "FailJob")) == fails
    if kind == "kubernetes" and not fails and code != 69:
        assert action == "Ignore"  # however often it happens


VARIATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {"shutdown_timeout_s": 90.0}) for kind in KINDS},
    "elastic": ("kubernetes", ELASTIC),
    "elastic jobset": ("jobset", ELASTIC),
    "with probes": ("jobset", {"metrics": ("0.0.0.0", 9400)}),
    "with variables": (
        "kubernetes", {"exported": (("HF_TOKEN", "hf_x"), ("HF_HOME", "/$(A) # \n: ")), },
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "version",
    ["1.33", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("1.31", "1.37"))],
)
@pytest.mark.parametrize("name", VARIATIONS)
def test_manifests_are_valid(name: str, version: str) -> None:
    """Against the strict schemas of Kubernetes; of custom resources, the Jobs and pods in them."""
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    kind, changes = VARIATIONS[name]
    documents = manifest(kind, **changes)
    standard = [each for each in documents if each["apiVersion"] in ("v1", "batch/v1")]
    for document in documents:
        standard += parts_of(document)
    for document in standard:
        validate.validate(document, version, strict=True)

    assert {each["kind"] for each in standard} >= {
        "kubernetes": {"Service", "Job", "Secret"}, "jobset": {"Job", "Secret"},
        "trainjob": {"Secret"}, "leaderworkerset": {"Pod", "Secret"},
    }[kind]  # fmt: skip


def parts_of(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the Jobs of a JobSet and the pods of a LeaderWorkerSet as documents."""
    name, spec = {"metadata": {"name": "node"}}, document.get("spec", {})
    for replicated in spec.get("replicatedJobs", []):
        yield {"apiVersion": "batch/v1", "kind": "Job", **name, **replicated["template"]}
    if "leaderWorkerTemplate" in spec:
        yield {
            "apiVersion": "v1", "kind": "Pod", **name,
            **spec["leaderWorkerTemplate"]["workerTemplate"],
        }  # fmt: skip


@pytest.mark.parametrize("name", [each for each in VARIATIONS if each != "trainjob"])
def test_a_manifest_passes_what_the_api_server_checks_beyond_its_schemas(name: str) -> None:
    """Fields that need each other, and names that have to exist."""
    kind, changes = VARIATIONS[name]
    for document in manifest(kind, **changes):
        for each in (document, *parts_of(document)):
            if each["kind"] == "Job":
                check_job(each["spec"])
            if each["kind"] == "Pod":
                check_pod(each["spec"])


def check_job(spec: dict[str, Any]) -> None:
    """Check what the API server's ValidateJobSpec checks of the fields that are used."""
    pod = spec["template"]["spec"]
    names = {each["name"] for each in pod["containers"]}
    rules = spec["podFailurePolicy"]["rules"]

    assert pod["restartPolicy"] == "Never"
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] <= spec["completions"]
    assert all(("onExitCodes" in rule) != ("onPodConditions" in rule) for rule in rules)
    assert {
        rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule
    } <= names
    has_indexes = "backoffLimitPerIndex" in spec
    assert has_indexes or not any(rule["action"] == "FailIndex" for rule in rules)
    assert has_indexes or "maxFailedIndexes" not in spec
    assert 0 < spec.get("maxFailedIndexes", 1) <= spec["completions"]
    assert not (has_indexes and "backoffLimit" in spec)
    check_pod(pod)


def check_pod(pod: dict[str, Any]) -> None:
    """Check what the API server's ValidatePodSpec checks of the fields that are used."""
    volumes = {each["name"] for each in pod["volumes"]}
    for container in pod["containers"]:
        ports = {each["name"] for each in container.get("ports", [])}
        variables = [each["name"] for each in container["env"]]

        assert {each["name"] for each in container["volumeMounts"]} <= volumes
        assert len(set(variables)) == len(variables)
        for probe in ("readinessProbe", "livenessProbe"):
            if probe in container:
                assert container[probe]["httpGet"]["port"] in ports


@pytest.mark.parametrize("kind", KINDS)
def test_secrets_are_in_the_secret_alone(kind: str) -> None:
    """Other exported variables are in the pod as they are; nothing shows a secret."""
    url = "https://ada:hf_hush@host"
    exported = (("HF_TOKEN", "hf_hush"), ("HF_HOME", "$(HOME)/$x"), ("HF_ENDPOINT", url))
    job = make_job(exported=exported, image="a")
    *others, secret = manifest(kind, exported=exported)
    (container,) = containers(others)
    variables = {each["name"]: each for each in container["env"]}

    assert "hf_hush" not in render_manifest(job, kind) + repr(job)
    assert expand(variables["HF_HOME"]["value"]) == "$(HOME)/$x"
    assert secret["stringData"] == {
        "meshrun-secret": "x", "HF_TOKEN": "hf_hush", "HF_ENDPOINT": url
    }  # fmt: skip
    keys = {
        "MESHRUN_SECRET": "meshrun-secret",
        "HF_TOKEN": "HF_TOKEN",
        "HF_ENDPOINT": "HF_ENDPOINT",
    }
    for name, key in keys.items():
        source = variables[name]["valueFrom"]["secretKeyRef"]
        assert source == {"name": secret["metadata"]["name"], "key": key}


def test_the_command_for_the_secret_has_no_secret_in_its_arguments(tmp_path: Path) -> None:
    """Every user of the machine can read them."""
    job = make_job(exported=(("HF_TOKEN", "x"), ("HF_ENDPOINT", "https://ada:x@host")), image="a")
    commented, *_ = render_manifest(job, "kubernetes").partition("\n---\n")
    lines = [line.removeprefix("# ") for line in commented.splitlines()]
    (kubectl := tmp_path / "kubectl").write_text(
        '#!/bin/bash\necho "$*"\nfor word in "${@:5}"; do cat "${word#*=*=}"; echo; done\n'
    )
    kubectl.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HF_TOKEN": "a b$", "HF_ENDPOINT": 'c"'}
    ran = subprocess.run(
        ["bash", "-c", "\n".join(lines[2:])], env=env, capture_output=True, text=True, check=True
    )
    words, secret, *others = filter(None, ran.stdout.split("\n"))

    assert words.startswith("create secret generic train-meshrun --from-file=meshrun-secret=/dev/")
    assert "a b" not in words
    assert re.fullmatch("[0-9a-f]{64}", secret)
    assert others == ["a b$", 'c"']


@pytest.mark.parametrize(
    ("metrics", "why"),
    [(None, None), (("0.0.0.0", 9400), None), (("::", 9400), None),
     (("127.0.0.1", 9400), "127.0.0.1 only"), (("0.0.0.0", 0), "a free port")],
)  # fmt: skip
def test_probes_ask_the_port_of_metrics(metrics: tuple[str, int] | None, why: str | None) -> None:
    """If it is reachable from outside the pod; the liveness probe waits for ranks that save."""
    job = make_job(metrics=metrics, shutdown_timeout_s=600.0)
    (container,) = containers(manifest("kubernetes", metrics=metrics, shutdown_timeout_s=600.0))
    alive = container.get("livenessProbe")

    assert (alive is None) == (metrics is None or why is not None)
    assert (why_no_probes(job) is None) == (why is None)
    assert why is None or why in str(why_no_probes(job))
    if alive is not None and metrics is not None:
        assert container["ports"] == [{"name": "metrics", "containerPort": metrics[1]}]
        assert alive["periodSeconds"] * alive["failureThreshold"] > 600


MODELS = {"jobset": "JobsetV1alpha2JobSet", "trainjob": "TrainerV1alpha1TrainJob"}
"""The generated model of each kind, named after its API group and version; no package has
LeaderWorkerSet's."""


def is_valid(kind: str, document: dict[str, Any]) -> bool:
    """Whether a document fits its kind's own schema, which knows all of its fields."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    try:
        read = getattr(models, MODELS[kind]).from_dict(document)
    except (ValueError, AttributeError):  # AttributeError: text in place of an object
        return False
    return bool(read.to_dict() == document)


def fields(value: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield every field below a value: the object that has it, and its name."""
    for name, below in list(value.items() if isinstance(value, dict) else enumerate(value)):
        if isinstance(value, dict):
            yield value, name
        if isinstance(below, dict | list):
            yield from fields(below)


LEADER_WORKER_SET = {
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "spec": {
            "required": ["leaderWorkerTemplate"],
            "additionalProperties": False,
            "properties": {
                "replicas": {"type": "integer"},
                "leaderWorkerTemplate": {
                    "required": ["workerTemplate"],
                    "additionalProperties": False,
                    "properties": {
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {
                            "enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
                        },
                        "workerTemplate": {"type": "object"},
                    },
                },
            },
        },
    },
}
"""The part of its definition that is used; its pods are checked by Kubernetes' schemas."""


def test_a_leader_worker_set_fits_its_definition() -> None:
    """Its pods restart, as those of a StatefulSet have to."""
    jsonschema = pytest.importorskip("jsonschema", reason="needs kubernetes-validate")
    document = manifest("leaderworkerset")[0]
    jsonschema.validate(document, LEADER_WORKER_SET)

    (pod,) = parts_of(document)
    assert "restartPolicy" not in pod["spec"]
    assert "subdomain" not in pod["spec"]


@pytest.mark.parametrize("kind", MODELS)
def test_custom_resources_fit_their_own_schemas(kind: str) -> None:
    """Every field is known there and has the right type."""
    document = manifest(kind, shutdown_timeout_s=90.0)[0]
    group, _, version = document["apiVersion"].partition("/")

    assert is_valid(kind, document)
    assert kind == "trainjob" or is_valid(kind, manifest(kind, **ELASTIC)[0])
    model = f"{group.partition('.')[0]}{version}{document['kind']}"
    assert model.lower() == MODELS[kind].lower()


@pytest.mark.parametrize("kind", MODELS)
def test_a_wrong_field_does_not_fit(kind: str) -> None:
    """Misspelt, or of another type, at any depth, except resources, whose names are free."""
    document = manifest(kind)[0]
    tried = 0
    for parent, name in list(fields(document)):
        if "/" in name or name == "cpu":
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
