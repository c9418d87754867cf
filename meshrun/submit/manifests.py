"""A job as Kubernetes manifests: a Job, a JobSet, a TrainJob or a LeaderWorkerSet. Pure.

Sources:
    Kubernetes 1.33, "Jobs", "Pod failure policy", "Success policy", "Backoff limit per index";
    JobSet, "Failure Policy"; Kubeflow Trainer v2, "TrainJob"; LeaderWorkerSet, "Concepts".
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from meshrun.errors import PREEMPTED, RendezvousError, UsageError, exit_code_of
from meshrun.host.network import is_unspecified
from meshrun.host.own_variables import SECRET
from meshrun.host.printable import holds_secret
from meshrun.plan.rendezvous_options import C10D, DEFAULT_PORT
from meshrun.submit.documents import Commented, apply_patches, render_yaml
from meshrun.submit.job import Job

CONTAINER = "meshrun"
SECRET_KEY = "meshrun-secret"  # noqa: S105 - the name of an entry, unlike that of any variable
_CORES_PER_GPU = 3
"""Not 4, since a machine with 4 cores per GPU reserves a part of them."""
_RESOURCES = {"auto": "nvidia.com/gpu", "cuda": "nvidia.com/gpu", "hpu": "habana.ai/gaudi",
              "xpu": "gpu.intel.com/xe", "npu": "huawei.com/Ascend910"}  # fmt: skip
_RESTARTS = 10
_KEPT_S = 7 * 86400
_LOST = RendezvousError.exit_code
_PREEMPTED = (PREEMPTED, exit_code_of(signal.SIGTERM))
"""Exit codes after SIGTERM: every rank exited with 0, or one did not, as it does not handle it."""
_CODES = ", ".join(map(str, _PREEMPTED))
_RUNTIME = "torch-distributed"
_Documents = list[dict[str, Any]]
_DISRUPTED = {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


class JobKind(Struct, frozen=True):
    """One way to run a job on Kubernetes."""

    render: Callable[[Job], _Documents]
    """Returns the documents, of which the last one is the job itself."""
    pod: tuple[str | int, ...] | None
    """The path of the pods' template in the job; ``None`` if it has none."""
    counts: tuple[tuple[str | int, ...], ...]
    """The paths of the number of nodes in the job."""
    why_fixed: str = ""
    """Why nodes cannot join and leave; "" if they can."""


def render_manifest(job: Job, kind: str) -> str:
    """Return the manifest of a job; ``kind`` is one of :data:`KINDS`.

    Raises:
        UsageError: If there is no image, no name for the device's resource, or a patch does not
            fit.
    """
    if job.image is None:
        raise UsageError(
            "--submit: Kubernetes needs a container image",
            hint="pass --image registry/name:tag, an image with torch, meshrun and the program",
        )
    documents = _documents(job, kind)
    # Pipes, as every user can read arguments.
    entries = [f"--from-file={SECRET_KEY}=<(openssl rand -hex 32)"]
    entries += [f'--from-file={name}=<(printf %s "${name}")' for name in secrets_of(job)]
    head = [
        f"# {job.summary}",
        "# Run this once, to create the secret by which the nodes recognize each other:",
        *_continued(f"kubectl create secret generic {secret_name(job)}", entries),
    ]
    parts = [render_yaml(document) for document in documents]
    return "\n".join([*head, "---", ""]) + "---\n".join(parts)


def _continued(command: str, options: list[str]) -> list[str]:
    """Return a command as comment lines, with one line per option if there are several."""
    if len(options) == 1:
        return [f"# {command} {options[0]}"]
    return [
        f"# {command} \\",
        *(f"#     {each} \\" for each in options[:-1]),
        f"#     {options[-1]}",
    ]


def render_workload(job: Job, kind: str) -> str:
    """Return the document of the job itself, the last of its manifest."""
    return render_yaml(_documents(job, kind)[-1])


def render_rest(job: Job, kind: str, secret: str, owner: Mapping[str, Any]) -> str:
    """Return the documents besides the job itself; they contain secrets, so they are never shown.

    By ``secret``, its nodes recognize each other. With ``owner``, a reference to the job, the API
    server deletes these documents.
    """
    *documents, _ = _documents(job, kind)
    own_secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": secret_name(job)},
        "type": "Opaque",
        "stringData": {SECRET_KEY: secret, **secrets_of(job)},
    }
    rest = [*documents, own_secret]
    for document in rest:
        document["metadata"] = {**document["metadata"], "ownerReferences": [dict(owner)]}
    return "---\n".join(map(render_yaml, rest))


def _documents(job: Job, kind: str) -> _Documents:
    found = KINDS[kind]
    counts = dict.fromkeys(found.counts, job.nnodes)
    return apply_patches(found.render(job), job.patches, pod=found.pod, counts=counts)


def _indexed_job(job: Job) -> _Documents:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        "spec": {
            "clusterIP": Commented(
                "None", f"Gives each pod a DNS name: node 0 is {job.name}-0.{job.name}."
            ),
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": job.name},
        },
    }  # fmt: skip
    pod = pod_spec(job, f"{job.name}-0.{job.name}", restartPolicy="Never", subdomain=job.name)
    if job.min_nodes is not None:
        ends = _ends_of_elastic(job, job.min_nodes)
    else:
        comment = "When a node is lost, the pods of all other nodes fail too."
        ends = {
            "backoffLimit": Commented(_RESTARTS * job.nnodes, comment),
            "podFailurePolicy": _fail_unless_preempted(_ignored()),
        }
    spec = {**_indexed(job), **ends, "ttlSecondsAfterFinished": _kept(), "template": {"spec": pod}}
    return [service, _document("batch/v1", "Job", job, spec)]


def _job_set(job: Job) -> _Documents:
    pod = pod_spec(job, f"{job.name}-node-0-0.{job.name}", restartPolicy="Never")
    if job.min_nodes is None:
        ends = {
            "backoffLimit": Commented(0, "No pod restarts on its own."),
            "podFailurePolicy": _fail_unless_preempted([{"action": "Count", **_DISRUPTED}]),
        }
        failed = {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
        failure = Commented(
            {"maxRestarts": _RESTARTS, "rules": [{"name": "failed", **failed}]},
            "A pod was preempted or drained, or a node was lost: restart all pods together.",
        )
    else:
        ends = _ends_of_elastic(job, job.min_nodes)
        failure = Commented({"maxRestarts": 0}, "Each pod restarts on its own.")
    spec = {**_indexed(job), **ends, "template": {"spec": pod}}
    whole = {
        "failurePolicy": failure,
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "ttlSecondsAfterFinished": _kept(),
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": spec}}],
    }
    return [_document("jobset.x-k8s.io/v1alpha2", "JobSet", job, whole)]


def _train_job(job: Job) -> _Documents:
    trainer: dict[str, Any] = {
        "image": job.image,
        "numNodes": job.nnodes,
        "numProcPerNode": Commented(
            job.workers, "The runtime passes these two and node 0's address in PET_ variables."
        ),
        "command": command_of(job, None),
        "env": variables_of(job),
        "resourcesPerNode": resources_of(job),
    }
    runtime = Commented(
        {"name": _RUNTIME},
        "The runtime sets how often the job may restart, and how long pods may take to"
        f"\nterminate: {job.grace_s} s are needed.",
    )
    spec = {"runtimeRef": runtime, "trainer": trainer}
    return [_document("trainer.kubeflow.org/v1alpha1", "TrainJob", job, spec)]


def _leader_worker_set(job: Job) -> _Documents:
    template = {
        "size": Commented(job.nnodes, "Each pod receives its index and the leader's address."),
        "restartPolicy": Commented(
            "RecreateGroupOnPodRestart", "Whenever a launcher exits, all nodes restart."
        ),
        "workerTemplate": {"spec": pod_spec(job, None)},
    }
    spec = {"replicas": 1, "leaderWorkerTemplate": template}
    return [_document("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", job, spec)]


KINDS: Mapping[str, JobKind] = {
    "kubernetes": JobKind(
        _indexed_job,
        ("spec", "template"),
        (("spec", "completions"), ("spec", "parallelism")),
    ),
    "jobset": JobKind(
        _job_set,
        ("spec", "replicatedJobs", 0, "template", "spec", "template"),
        tuple(
            ("spec", "replicatedJobs", 0, "template", "spec", name)
            for name in ("completions", "parallelism")
        ),
    ),
    "trainjob": JobKind(
        _train_job,
        None,
        (("spec", "trainer", "numNodes"),),
        why_fixed="a TrainJob gives its pods a fixed number of nodes, and its runtime decides how"
        " they restart",
    ),
    "leaderworkerset": JobKind(
        _leader_worker_set,
        ("spec", "leaderWorkerTemplate", "workerTemplate"),
        (("spec", "leaderWorkerTemplate", "size"),),
        why_fixed="the pods of a LeaderWorkerSet restart together",
    ),
}


def _document(version: str, kind: str, job: Job, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": job.name}, "spec": spec}


def _kept() -> Commented:
    return Commented(_KEPT_S, "Keep the finished job and its log for a week.")


def _indexed(job: Job) -> dict[str, Any]:
    return {
        "completionMode": Commented("Indexed", "One pod per node; its index is the node rank."),
        "completions": job.nnodes,
        "parallelism": job.nnodes,
    }


def _ends_of_elastic(job: Job, min_nodes: int) -> dict[str, Any]:
    """Return how pods and the job end if the other pods continue without one that fails."""
    return {
        "successPolicy": Commented(
            {"rules": [{"succeededIndexes": "0"}]},
            "Node 0 exits with 0 once all programs have finished, even if other pods still wait.",
        ),
        "backoffLimitPerIndex": _RESTARTS,
        "maxFailedIndexes": Commented(
            job.nnodes - min_nodes, f"The launch needs {min_nodes} of the {job.nnodes} nodes."
        ),
        "podFailurePolicy": Commented(
            {"rules": [*_ignored(), _unless_preempted("FailIndex")]},
            f"{_CODES}: the pod was preempted or drained. {_LOST}: it was cut off. In both cases it"
            " starts\nagain and joins the others. Any other exit code is a failure of the node,"
            " which is left\nout, or of the launch, which ends on every node.",
        ),
    }


def _ignored() -> _Documents:
    exits = {"containerName": CONTAINER, "operator": "In", "values": [*_PREEMPTED]}
    return [{"action": "Ignore", "onExitCodes": exits}, {"action": "Ignore", **_DISRUPTED}]


def _fail_unless_preempted(before: _Documents) -> Commented:
    comment = (
        f"{_CODES}: a pod was preempted or drained, and every node stopped its ranks. {_LOST}:"
        " another\nnode was lost. In both cases all pods restart. Any other exit code is a"
        " failure that\nends the job."
    )
    return Commented({"rules": [*before, _unless_preempted("FailJob")]}, comment)


def _unless_preempted(action: str) -> dict[str, Any]:
    values = [_LOST, *_PREEMPTED]
    exits = {"containerName": CONTAINER, "operator": "NotIn", "values": values}
    return {"action": action, "onExitCodes": exits}


def pod_spec(job: Job, coordinator: str | None, **more: Any) -> dict[str, Any]:
    """Return the pod of each node.

    ``coordinator`` is the name of its pod, ``None`` if variables tell the pods. Fields in
    ``more`` come first.
    """
    return {
        **more,
        "terminationGracePeriodSeconds": Commented(
            job.grace_s,
            "Ranks get --shutdown-timeout of this to save and exit; the rest is for meshrun.",
        ),
        "automountServiceAccountToken": Commented(
            False, "Ranks need no access to the cluster, nor a variable for each of its services."
        ),
        "enableServiceLinks": False,
        "containers": [_container(job, coordinator)],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _container(job: Job, coordinator: str | None) -> dict[str, Any]:
    return {
        "name": CONTAINER,
        "image": job.image,
        "command": command_of(job, coordinator),
        "env": variables_of(job),
        "resources": resources_of(job),
        "securityContext": {"allowPrivilegeEscalation": False},
        **_probes(job),
        "volumeMounts": Commented(
            [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 - of the container
            "Loader workers and NCCL use shared memory; containers default to 64 MiB.",
        ),
    }


def command_of(job: Job, coordinator: str | None) -> list[str]:
    """Return the command of the container, escaped so that Kubernetes expands no ``$(NAME)``."""
    rendezvous: tuple[str, ...] = ()
    if coordinator and job.min_nodes is not None:
        rendezvous = ("--rdzv-backend", C10D, "--rdzv-endpoint", f"{coordinator}:{DEFAULT_PORT}")
    elif coordinator and job.nnodes > 1:
        rendezvous = ("--master-addr", coordinator, "--master-port", str(DEFAULT_PORT))
    words = ["meshrun", *rendezvous, *(word for words in job.words for word in words)]
    return [_literal(word) for word in words]


def variables_of(job: Job) -> list[Any]:
    """Return the variables of the container; secret ones refer to the Secret."""
    own = Commented(
        {"name": SECRET, "valueFrom": _from_secret(job, SECRET_KEY)},
        "The secret by which the nodes recognize each other.",
    )
    exported: list[dict[str, Any]] = [
        {"name": name, "valueFrom": _from_secret(job, name)}
        if holds_secret(name, value)
        else {"name": name, "value": _literal(value)}
        for name, value in job.exported
    ]
    if not exported:
        return [own]
    return [own, Commented(exported[0], "From --export."), *exported[1:]]


def resources_of(job: Job) -> dict[str, Any]:
    """Return the resources that a node needs.

    Raises:
        UsageError: If the device has no known name in Kubernetes.
    """
    cores = {"cpu": job.accelerators * _CORES_PER_GPU or job.workers}
    requests = Commented(cores, "What a node must have free; pods may use more cores.")
    if not job.accelerators:
        return {"requests": requests}
    device = job.plan.request.device
    if device not in _RESOURCES:
        known = [name for name in _RESOURCES if name != "auto"]
        raise UsageError(
            f"--submit: no known Kubernetes resource for device `{device}`",
            hint=f"use --device {', '.join(known)} or cpu",
        )
    return {"requests": requests, "limits": {_RESOURCES[device]: job.accelerators}}


def secret_name(job: Job) -> str:
    """Return the name of the job's Secret."""
    return f"{job.name}-meshrun"


def secrets_of(job: Job) -> dict[str, str]:
    """Return the exported variables whose values are only in the Secret."""
    return {name: value for name, value in job.exported if holds_secret(name, value)}


def why_no_probes(job: Job) -> str | None:
    """Return why the metrics port cannot be probed; ``None`` if it can, or if there is none."""
    if job.plan.request.metrics is None:
        return None
    host, port = job.plan.request.metrics
    if not is_unspecified(host):
        return f"--metrics is open on {host} only, where nothing outside the pod reaches it"
    return None if port else "--metrics uses a free port, which nothing outside the pod knows"


def _probes(job: Job) -> dict[str, Any]:
    if job.plan.request.metrics is None or why_no_probes(job) is not None:
        return {}
    port = job.plan.request.metrics[1]
    return {
        "ports": [{"name": "metrics", "containerPort": port}],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "metrics"}, "periodSeconds": 10},
        "livenessProbe": Commented(
            {
                "httpGet": {"path": "/healthz", "port": "metrics"},
                "periodSeconds": 30,
                "failureThreshold": max(10, -(-2 * job.grace_s // 30)),
            },
            "Ends a launcher that does not respond; the launcher itself handles hung ranks.",
        ),
    }


def _from_secret(job: Job, key: str) -> dict[str, Any]:
    return {"secretKeyRef": {"name": secret_name(job), "key": key}}


def _literal(text: str) -> str:
    """Return a text escaped so that Kubernetes expands nothing in it."""
    return text.replace("$", "$$")
