"""--submit-patch: what a strategic merge patch makes of a manifest, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshrun.errors import UsageError
from meshrun.submit.documents import read_patches
from meshrun.submit.manifests import KINDS, render_manifest
from tests.unit.test_submit_texts import containers, make_job


def patched(kind: str, text: str) -> list[dict[str, Any]]:
    """Return the documents of a job with a patch."""
    job = make_job(image="a", patches=read_patches(text, "p.yaml"))
    return list(yaml.safe_load_all(render_manifest(job, kind)))


def changed(text: str) -> dict[str, Any]:
    """Return an Indexed Job with a patch."""
    return patched("kubernetes", text)[-1]


def in_order(value: Any) -> Any:
    """Return a document with its lists sorted, to compare it with one in another order."""
    if isinstance(value, dict):
        return {name: in_order(each) for name, each in value.items()}
    if isinstance(value, list):
        return sorted(map(in_order, value), key=lambda each: json.dumps(each, sort_keys=True))
    return value


WHOLE = """\
apiVersion: batch/v1
kind: Job
metadata:
  labels: {kueue.x-k8s.io/queue-name: research}
  annotations: {"on": "1.0"}
spec:
  ttlSecondsAfterFinished: null
  activeDeadlineSeconds: 3600
  podFailurePolicy:
    rules: [{action: Count, onExitCodes: {operator: In, values: [3]}}]
  template:
    metadata: {labels: {team: vision}}
    spec:
      serviceAccountName: train
      imagePullSecrets: [{name: hub}]
      nodeSelector: {gpu: h200}
      tolerations: [{key: gpu, operator: Exists}]
      topologySpreadConstraints:
        - {topologyKey: rack, maxSkew: 1, whenUnsatisfiable: DoNotSchedule}
      securityContext: {runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}
      initContainers: [{name: fetch, image: "hub/fetch:1"}]
      containers:
        - name: meshrun
          args: [--more]
          env: [{name: NCCL_DEBUG, value: WARN}, {name: MESHRUN_SECRET, $patch: delete}]
          resources: {limits: {rdma/hca: 8, memory: 900Gi}, requests: {cpu: 90}}
          securityContext: {capabilities: {add: [IPC_LOCK]}}
          volumeMounts: [{name: data, mountPath: /data}, {name: shm, mountPath: /dev/shm}]
        - {name: sidecar, image: "hub/side:1"}
      volumes:
        - {name: shm, emptyDir: {sizeLimit: 64Gi}}
        - {name: data, persistentVolumeClaim: {claimName: data}}
"""
REPLACED = """\
kind: Job
apiVersion: batch/v1
spec:
  podFailurePolicy: {$patch: replace, rules: []}
  template:
    spec:
      volumes: [{$patch: replace}, {name: shm, hostPath: {path: /dev/shm}}]
      containers:
        - name: meshrun
          resources: {$patch: delete}
          securityContext: null
"""


@pytest.mark.parametrize("patch", [WHOLE, REPLACED], ids=["whole", "replaced"])
def test_a_patch_does_what_kustomize_does(tmp_path: Path, patch: str) -> None:
    """kustomize uses the API server's own code; only the order of lists differs."""
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    named = yaml.safe_load(patch)
    named.setdefault("metadata", {})["name"] = "train"
    (tmp_path / "job.yaml").write_text(render_manifest(make_job(image="a"), "kubernetes"))
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [job.yaml]\npatches: [{{patch: {json.dumps(json.dumps(named))}}}]\n"
    )
    done = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=True
    )
    theirs = [each for each in yaml.safe_load_all(done.stdout) if each["kind"] == "Job"]

    assert [in_order(changed(patch))] == [in_order(each) for each in theirs]


def test_the_whole_example_is_valid() -> None:
    """So an API server accepts the patch above."""
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    validate.validate(changed(WHOLE.replace("values: [3]", "values: [3], containerName: meshrun")),
                      "1.33", strict=True)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_one_patch_changes_pods_of_every_kind(kind: str) -> None:
    """Wherever they are described; a TrainJob's runtime describes its pods."""
    text = "{kind: Pod, spec: {containers: [{name: meshrun, env: [{name: A, value: 'yes'}]}]}}"
    if kind == "trainjob":
        with pytest.raises(UsageError, match="the pods of a TrainJob are described by its runtime"):
            patched(kind, text)
        text = "{spec: {trainer: {env: [{name: A, value: 'yes'}]}}}"
    (container,) = containers(patched(kind, text))

    assert [each["name"] for each in container["env"]] == ["MESHRUN_SECRET", "A"]
    assert container["env"][1]["value"] == "yes"


def test_patches_are_applied_in_order() -> None:
    """Documents without a kind change the job, others the kind they name; comments stay."""
    first = (
        "spec: {activeDeadlineSeconds: 1}\n---\nkind: Service\nmetadata: {labels: {a: b}}\n---\n"
    )
    second = '{"spec": {"activeDeadlineSeconds": 2}}'
    job = make_job(image="a", patches=(*read_patches(first, "a"), *read_patches(second, "b")))
    text = render_manifest(job, "kubernetes")
    service, workload = yaml.safe_load_all(text)

    assert service["metadata"]["labels"] == {"a": "b"}
    assert workload["spec"]["activeDeadlineSeconds"] == 2
    assert "# One pod per node; its index is the node rank.\n  completionMode: Indexed" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: Deployment", "for a Deployment, and the job has Service (v1), Job (batch/v1)"),
        ("{kind: Job, apiVersion: batch/v2}", "it is for a Job (batch/v2), and the job has"),
        ("spec: {completions: 3, parallelism: 3}", "spec.completions to 3, but the plan has 2"),
        ("spec: {parallelism: null}", "sets spec.parallelism to None, but the plan has 2 nodes"),
        ("spec: null", "sets spec.completions to None"),
        ("metadata: {name: other}", "hint: set another name with --rdzv-id"),
        ("metadata: {namespace: ml}", "hint: use --submit-arg=--namespace=..."),
        ("{kind: Pod, spec: {containers: [{name: train, env: []}]}}",
         "adds a container `train` without an image\nhint: the container of the ranks is named"),
        ("{kind: Pod, spec: {containers: [{image: b}]}}", "an entry of containers has no name"),
        ("{kind: Pod, spec: {containers: [meshrun]}}", "entries of containers are mappings, found"),
        ("{kind: Pod, spec: {containers: {name: b}}}", "containers is a list, found a mapping: "),
        ("spec: 3", "spec is a mapping, found a single value: 3"),
        ("spec: {$setElementOrder/volumes: []}", "`$setElementOrder/volumes` is not supported"),
        ("spec: {$patch: remove}", "$patch is merge, replace, delete, found 'remove'"),
        ("- op: add", "expected fields of the manifest, found a list"),
        ("text", "expected fields of the manifest, found 'text'"),
        ("spec: {on: 1}", "field names must be text, found True"),
        ("spec: &spec {more: *spec}", "it contains itself"),
        ("spec: [", "p.yaml: while parsing a flow node"),
        ("a: \0", "p.yaml: unacceptable character"),
        ("[" * 100_000, "p.yaml: it is nested too deeply"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(text: str, message: str) -> None:
    """The error has the file, what was found, and what to write instead."""
    with pytest.raises(UsageError) as refused:
        changed(text)

    assert "--submit-patch p.yaml: " in str(refused.value)
    assert message in str(refused.value)


def test_json_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """YAML does, and the error names it."""
    monkeypatch.setitem(sys.modules, "yaml", None)

    assert read_patches('{"spec": {}}', "p.json")[0].document == {"spec": {}}
    with pytest.raises(UsageError, match="pip install 'meshrun\\[kubernetes\\]'"):
        read_patches("spec: {}", "p.yaml")
