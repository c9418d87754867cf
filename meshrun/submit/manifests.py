"""A job as Kubernetes manifests: an Indexed Job, a JobSet or a Kubeflow TrainJob. Pure.

Sources:
    Kubernetes 1.31, "Jobs", "Pod failure policy"; JobSet, "Failure Policy"; Kubeflow Trainer v2,
    "TrainJob".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshrun.errors import UsageError
from meshrun.submit.job import Job
from meshrun.submit.yaml import Explained, render_yaml

PORT = 29500
SECRET_KEY = "secret"  # noqa: S105 - the name of an entry
_RESTARTS = 10
_LOST = 69
_PREEMPTED = (75, 143)
"""SIGTERM came, and every rank ended well, or not: the second for programs that save nothing."""
_RESOURCES = {"auto": "nvidia.com/gpu", "cuda": "nvidia.com/gpu", "hpu": "habana.ai/gaudi",
              "xpu": "gpu.intel.com/xe", "npu": "huawei.com/Ascend910"}  # fmt: skip
_RUNTIME = "torch-distributed"
_Documents = list[dict[str, Any]]


def render_manifest(job: Job, kind: str) -> str:
    """Return the documents that make the job; ``kind`` is one of :data:`KINDS`.

    Raises:
        UsageError: If there is no image, or no name for the device's resource.
    """
    if job.image is None:
        raise UsageError(
            "--submit: Kubernetes needs a container image",
            hint="pass --image registry/name:tag, an image with torch, meshrun and the program",
        )
    documents = KINDS[kind](job)
    head = [
        f"# {job.summary}",
        "# Run this once, to create the secret by which the nodes recognize each other:",
        f"# kubectl create secret generic {secret_name(job)}"
        f" --from-literal={SECRET_KEY}=$(openssl rand -hex 32)",
    ]
    parts = [render_yaml(document) for document in documents]
    return "\n".join([*head, "---", ""]) + "---\n".join(parts)


def render_workload(job: Job, kind: str) -> str:
    """Return the document of the job itself, the last of its manifest."""
    return render_yaml(KINDS[kind](job)[-1])


def render_rest(job: Job, kind: str, secret: str, owner: Mapping[str, Any]) -> str:
    """Return the documents in addition to the job; never shown, as they contain the secret.

    Args:
        job: What they are for.
        kind: One of :data:`KINDS`.
        secret: What its nodes know each other by.
        owner: The job as the API server knows it: once that is gone, they go too.
    """
    *documents, _ = KINDS[kind](job)
    rest = [*documents, _secret(job, secret)]
    for document in rest:
        document["metadata"] = {**document["metadata"], "ownerReferences": [dict(owner)]}
    return "---\n".join(map(render_yaml, rest))


def _secret(job: Job, secret: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": secret_name(job)},
        "type": "Opaque",
        "stringData": {SECRET_KEY: secret},
    }


def secret_name(job: Job) -> str:
    """Return the name of the Secret by which the job's nodes know each other."""
    return f"{job.name}-meshrun"


def _indexed_job(job: Job) -> _Documents:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        "spec": {
            "clusterIP": Explained(
                "None", f"Gives each pod a DNS name: node 0 is {job.name}-0.{job.name}."
            ),
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": job.name},
        },
    }  # fmt: skip
    return [
        service,
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": job.name},
            "spec": _job_spec(job, f"{job.name}-0.{job.name}", subdomain=job.name),
        },
    ]


def _job_set(job: Job) -> _Documents:
    spec = _job_spec(job, f"{job.name}-node-0-0.{job.name}", subdomain=None)
    spec["backoffLimit"] = Explained(0, "No pod restarts on its own.")
    evicted = {
        "action": "Count",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    spec["podFailurePolicy"] = _fail_unless_preempted([evicted])
    failure = {
        "maxRestarts": _RESTARTS,
        "rules": [
            {"name": "failed", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
        ],
    }
    why = "A pod was preempted or drained, or a node was lost: restart all pods together."
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": job.name},
            "spec": {
                "failurePolicy": Explained(failure, why),
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": spec}}],
            },
        }
    ]


def _train_job(job: Job) -> _Documents:
    limits = _limits(job)
    trainer: dict[str, Any] = {
        "image": job.image,
        "numNodes": job.nnodes,
        "numProcPerNode": Explained(
            job.workers, "The runtime passes these two and node 0's address in PET_ variables."
        ),
        "command": _command(job, None),
        "env": _env(job),
    }  # fmt: skip
    if limits:
        trainer["resourcesPerNode"] = {"limits": limits}
    return [
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": job.name},
            "spec": {
                "runtimeRef": Explained(
                    {"name": _RUNTIME},
                    "The runtime sets how often the job may restart, and how long pods may"
                    f" take to\nterminate: {job.grace_s} s are needed.",
                ),
                "trainer": trainer,
            },
        }
    ]


KINDS: Mapping[str, Callable[[Job], _Documents]] = {
    "kubernetes": _indexed_job,
    "jobset": _job_set,
    "trainjob": _train_job,
}


def _job_spec(job: Job, head: str, *, subdomain: str | None) -> dict[str, Any]:
    pod = {
        "restartPolicy": "Never",
        **({"subdomain": subdomain} if subdomain else {}),
        "terminationGracePeriodSeconds": Explained(
            job.grace_s,
            "Ranks get --shutdown-timeout of this to save and exit; the rest is for meshrun.",
        ),
        "containers": [_container(job, head)],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    return {
        "completionMode": Explained("Indexed", "One pod per node; its index is the node rank."),
        "completions": job.nnodes,
        "parallelism": job.nnodes,
        "backoffLimit": Explained(
            _RESTARTS * job.nnodes, "When a node is lost, the pods of all other nodes fail too."
        ),
        "podFailurePolicy": _fail_unless_preempted(
            [
                {"action": "Ignore",
                 "onExitCodes": {"containerName": "meshrun", "operator": "In",
                                 "values": [*_PREEMPTED]}},
                {"action": "Ignore",
                 "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        ),
        "template": {"spec": pod},
    }  # fmt: skip


def _fail_unless_preempted(ignored: _Documents) -> Explained:
    why = (
        "75, 143: a pod was preempted or drained, and every node stopped its ranks. 69:"
        " another\nnode was lost. In both cases all pods restart. Any other exit code is a"
        " failure that\nends the job."
    )
    fail = {
        "action": "FailJob",
        "onExitCodes": {
            "containerName": "meshrun",
            "operator": "NotIn",
            "values": [_LOST, *_PREEMPTED],
        },
    }
    return Explained({"rules": [*ignored, fail]}, why)


def _container(job: Job, head: str) -> dict[str, Any]:
    limits = _limits(job)
    return {
        "name": "meshrun",
        "image": job.image,
        "command": _command(job, head),
        "env": _env(job),
        **({"resources": {"limits": limits}} if limits else {}),
        "volumeMounts": Explained(
            [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 - of the container
            "Loader workers and NCCL use shared memory; containers default to 64 MiB.",
        ),
    }


def _command(job: Job, head: str | None) -> list[str]:
    """Return the words of the container, whose ``$(NAME)`` Kubernetes would fill in."""
    rendezvous = (
        ("--master-addr", head, "--master-port", str(PORT)) if head and job.nnodes > 1 else ()
    )
    words = ["meshrun", *rendezvous, *(word for words in job.words for word in words)]
    return [word.replace("$", "$$") for word in words]


def _env(job: Job) -> list[Any]:
    source = {"secretKeyRef": {"name": secret_name(job), "key": SECRET_KEY}}
    return [
        Explained(
            {"name": "MESHRUN_SECRET", "valueFrom": source},
            "The secret by which the nodes recognize each other.",
        )
    ]


def _limits(job: Job) -> dict[str, int]:
    if not job.accelerators:
        return {}
    device = job.plan.request.device
    if device not in _RESOURCES:
        known = [name for name in _RESOURCES if name != "auto"]
        raise UsageError(
            f"--submit: no known Kubernetes resource for device `{device}`",
            hint=f"use --device {', '.join(known)} or cpu",
        )
    return {_RESOURCES[device]: job.accelerators}
