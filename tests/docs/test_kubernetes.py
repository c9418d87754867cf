"""The manifests of the docs are valid, and so are their commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit import ROOT, run_meshrun

yaml = pytest.importorskip("yaml", reason="needs kubernetes-validate")
validator = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")

PAGE = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
MANIFESTS = [
    manifest
    for text in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for manifest in yaml.safe_load_all(text)
]
NAMES = [f"{number} {manifest['kind']}" for number, manifest in enumerate(MANIFESTS)]
OWN = {"v1", "batch/v1"}
"""API versions that the API server knows without custom resource definitions."""
GIVEN = {
    "TrainJob": {
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "train-node-0-0.train", "PET_MASTER_PORT": "29400",
    },
    "PyTorchJob": {
        "MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": "1",
        "KUBERNETES_SERVICE_HOST": "10.96.0.1", "PET_NNODES": "2",
    },
    "Job": {"JOB_COMPLETION_INDEX": "1"},
    "JobSet": {"JOB_COMPLETION_INDEX": "1"},
    "LeaderWorkerSet": {
        "LWS_LEADER_ADDRESS": "serve-0.serve.default", "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": "1",
    },
}  # fmt: skip
"""Variables of a pod's environment. A PyTorchJob is otherwise recognized by its host name."""


def known_parts(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what the API server itself knows: the whole manifest, or its templates."""
    if manifest["apiVersion"] in OWN:
        yield manifest
        return
    for part in walk(manifest["spec"]):
        template = part.get("template", part.get("workerTemplate", {})).get("spec", {})
        if "completions" in template:
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, "spec": template}
        elif "containers" in template:
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": template}


def walk(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, dict | list):
            yield from walk(each)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=NAMES)
def test_a_manifest_is_valid(manifest: dict[str, Any]) -> None:
    """Against the API server's schemas, without unknown fields."""
    parts = list(known_parts(manifest))
    for part in parts:
        validator.validate(part, "1.31", strict=True)

    assert parts or manifest["kind"] == "TrainJob"


@pytest.mark.parametrize("manifest", MANIFESTS, ids=NAMES)
def test_its_command_is_a_launch_on_two_nodes(manifest: dict[str, Any]) -> None:
    """In a pod's environment."""
    commands = [part["command"] for part in walk(manifest) if "command" in part]
    for name, *words in commands:
        ours = run_meshrun("--dry-run", *words, env=GIVEN[manifest["kind"]])

        assert name == "meshrun"
        assert ours.returncode == 0, ours.stderr
        assert "16 ranks on 2 nodes x 8 workers" in ours.stdout
    assert commands or manifest["kind"] == "Service"


@pytest.mark.parametrize("manifest", MANIFESTS, ids=NAMES)
def test_it_has_what_ranks_need(manifest: dict[str, Any]) -> None:
    """GPUs, the launch's secret and shared memory, like the manifests that meshrun generates."""
    for part in walk(manifest):
        if "command" in part:
            (secret,) = part["env"]
            resources = part.get("resources", part.get("resourcesPerNode"))
            assert secret["name"] == "MESHRUN_SECRET"
            assert resources == {"limits": {"nvidia.com/gpu": 8}}
        if "containers" in part:
            (container,) = part["containers"]
            assert container["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
            assert part["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory"}}]


def test_its_failure_policy_is_that_of_a_submitted_job() -> None:
    """Preempted pods restart, those that lost a node a few times, and others do not."""
    (job,) = (each["spec"] for each in MANIFESTS if each["kind"] == "Job")
    made = yaml.safe_load_all((ROOT / "tests/golden/submit-kubernetes.yaml").read_text())
    (ours,) = (each["spec"] for each in made if each["kind"] == "Job")
    text = str(ours["podFailurePolicy"]).replace("'meshrun'", "'train'")

    assert str(job["podFailurePolicy"]) == text
