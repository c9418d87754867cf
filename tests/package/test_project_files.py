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
def test_a_workflow_runs_what_exists(path: Path) -> None:
    """Its extras, folders and scripts exist, and each job has a time limit and minimal rights."""
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


def test_every_supported_python_is_tested() -> None:
    """The matrix, the classifiers and requires-python agree."""
    matrix = yaml.safe_load((GITHUB / "workflows" / "tests.yml").read_text())["jobs"]["python"]
    pythons = matrix["strategy"]["matrix"]["python"]
    supported = re.findall(r"Python :: (3\.\d+)", PROJECT)

    assert f'requires-python = ">={pythons[0]}"' in PROJECT
    assert pythons[: len(supported)] == supported


def test_the_bug_form_asks_for_a_report() -> None:
    """By an option that exists; and links lead to the docs that the help names."""
    assert f"meshrun {Options.report_bug.flag}" in (GITHUB / "ISSUE_TEMPLATE/bug.yml").read_text()
    for place in (GITHUB / "ISSUE_TEMPLATE" / "config.yml", ROOT / "pyproject.toml"):
        assert DOCS in place.read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_file_is_valid(schema: str) -> None:
    """Against the schemas of GitHub and Read the Docs."""
    pytest.importorskip("check_jsonschema", reason="needs the extra `package`")
    checked = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}",
         *SCHEMAS[schema]],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert checked.returncode == 0, checked.stdout


def test_actionlint_finds_nothing() -> None:
    """It checks expressions, shell and the inputs of actions."""
    if shutil.which("actionlint") is None:
        pytest.skip("needs actionlint")
    checked = subprocess.run(["actionlint"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert checked.returncode == 0, checked.stdout
