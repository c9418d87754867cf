"""The pod of a node: its container, variables, resources and probes. Pure."""

from __future__ import annotations

from typing import Any

from meshrun.errors import UsageError
from meshrun.host.interfaces import is_unspecified
from meshrun.host.own_variables import SECRET
from meshrun.plan.masking import holds_secret
from meshrun.plan.rendezvous_options import C10D, DEFAULT_PORT
from meshrun.submit.job import Job
from meshrun.submit.yaml import Commented

CONTAINER = "meshrun"
SECRET_KEY = "meshrun-secret"  # noqa: S105 - the name of an entry, unlike that of any variable
_CORES_PER_GPU = 3
"""Not 4, since a machine with 4 cores per GPU reserves a part of them."""
_RESOURCES = {"auto": "nvidia.com/gpu", "cuda": "nvidia.com/gpu", "hpu": "habana.ai/gaudi",
              "xpu": "gpu.intel.com/xe", "npu": "huawei.com/Ascend910"}  # fmt: skip


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
