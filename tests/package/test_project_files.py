"""What GitHub reads: workflows, forms and settings."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meshrun.cli.options import Options
from meshrun.wording import DOCS
from tests.kit import ROOT

yaml = pytest.importorskip("yaml", reason="needs PyYAML")

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
PROJECT = (ROOT / "pyproject.toml").read_text()
SCHEMAS: dict[str, list[Path]] = {
    "github-workflows": WORKFLOWS,
    "github-issue-forms": FORMS,
    "github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "dependabot": [GITHUB / "dependabot.yml"],
    "readthedocs": [ROOT / ".readthedocs.yaml"],
}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_there_is(path: Path) -> None:
    """Its extras, folders and scripts exist, each job has a limit, and nobody gets more rights."""
    text = path.read_text()
    workflow = yaml.safe_load(text)
    extras = {name for names in re.findall(r"\.\[([\w,]+)\]", text) for name in names.split(",")}

    assert [extra for extra in extras if f"\n{extra} = [" not in PROJECT] == []
    for found in re.findall(r"tests/\w+|\.ci/run|docs/[\w.]+", text):
        assert (ROOT / found).exists(), found
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 240, name
        rights = {"id-token": "write"} if name == "publish" else None
        assert job.get("permissions") == rights, name


def test_every_python_that_is_promised_is_run() -> None:
    """From the floor up, in the matrix and among the classifiers."""
    matrix = yaml.safe_load((GITHUB / "workflows" / "tests.yml").read_text())["jobs"]["python"]
    pythons = matrix["strategy"]["matrix"]["python"]
    promised = re.findall(r"Python :: (3\.\d+)", PROJECT)

    assert f'requires-python = ">={pythons[0]}"' in PROJECT
    assert pythons[: len(promised)] == promised


def test_a_bug_comes_with_a_report() -> None:
    """By an option that there is; and the docs are where the help says."""
    assert f"meshrun {Options.report_bug.flag}" in (GITHUB / "ISSUE_TEMPLATE/bug.yml").read_text()
    for place in (GITHUB / "ISSUE_TEMPLATE" / "config.yml", ROOT / "pyproject.toml"):
        assert DOCS in place.read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_file_is_valid(schema: str) -> None:
    """By GitHub's and Read the Docs' schemas."""
    pytest.importorskip("check_jsonschema", reason="needs the extra `package`")
    checked = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}",
         *SCHEMAS[schema]],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert checked.returncode == 0, checked.stdout


def test_actionlint_is_content() -> None:
    """Expressions, shell and the inputs of actions, where it is installed."""
    if shutil.which("actionlint") is None:
        pytest.skip("needs actionlint")
    checked = subprocess.run(["actionlint"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert checked.returncode == 0, checked.stdout
