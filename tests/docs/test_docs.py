"""Every block of the README and the docs is executed, and every link has a target."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from meshrun.wording import DOCS
from tests.kit import ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^([ ]*)```(\w+)([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
NIGHTLY = re.compile(r"^ *```console.* nightly", re.MULTILINE)
WITHOUT_TORCH = ("restart.md", "leave-out-nodes.md", "metrics.md", "report-json.md")
"""Pages that run launches whose ranks need no torch."""
LINK = re.compile(r"\]\((?!https?:)([^)#]+)[^)]*\)")


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Return (language, words after it, text) of each fenced block, without its indentation."""
    found = []
    for indent, language, words, text in FENCE.findall(page.read_text()):
        lines = [line.removeprefix(indent) for line in text.splitlines()]
        found.append((language, words, "\n".join(lines) + "\n"))
    return found


def check(words: str, text: str, folder: Path) -> None:
    """Run a console block's command and compare its output with the rest of the block."""
    command, _, expected = text.removeprefix("$ ").partition("\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path, "COLUMNS": "80", "MESHRUN_NATIVE_STACKS": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    found = re.sub(r"[ \t]+$", "", result.stdout, flags=re.MULTILINE)
    if "sorted" in words:
        found = "".join(sorted(found.splitlines(keepends=True)))
    code = int(match.group(1)) if (match := re.search(r"exit=(\d+)", words)) else 0
    matches = doctest.OutputChecker().check_output(expected, found, doctest.ELLIPSIS)
    assert matches, f"$ {command}\nexpected:\n{expected}\nfound:\n{found}"
    assert result.returncode == code, found


@pytest.mark.torch
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_do_what_they_say(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Files are written, commands run, and their output matches the page."""
    if page.name in WITHOUT_TORCH:
        request.getfixturevalue("fake_torch")
    execute([block for block in blocks(page) if "nightly" not in block[1]], tmp_path)


@pytest.mark.torch
@pytest.mark.nightly
@pytest.mark.parametrize(
    "page", [page for page in PAGES if NIGHTLY.search(page.read_text())], ids=lambda page: page.stem
)
def test_costly_blocks_do_what_they_say(page: Path, tmp_path: Path) -> None:
    """Blocks whose first line ends in ``nightly``, with all others of the page."""
    execute(blocks(page), tmp_path)


def execute(found: list[tuple[str, str, str]], tmp_path: Path) -> None:
    """Write the files of blocks and run their commands, in order."""
    (tmp_path / "train.py").write_text("")
    for language, words, text in found:
        if match := re.search(r"file=(\S+)", words):
            (tmp_path / match.group(1)).write_text(text)
        if language == "console":
            assert text.startswith("$ ")
            check(words, text, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_have_a_target(page: Path) -> None:
    """A file or a folder."""
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


def test_links_to_other_sites_are_addresses() -> None:
    """All of them are on pages of the site, where the docs' workflow follows them each night."""
    elsewhere = {ROOT / "README.md", *(ROOT / ".github").rglob("*.md")}
    for page in (*PAGES, ROOT / "examples" / "README.md", *elsewhere):
        for found in re.findall(r"https?://[^\s<>`\"]+", page.read_text()):
            address = urlsplit(found.rstrip(").,:;"))
            here = address.hostname in {"127.0.0.1", "localhost"}
            assert here or (address.scheme == "https" and "." in (address.hostname or "")), found
            assert here or page not in elsewhere or found.startswith(DOCS), (page.name, found)


def test_ci_runs_the_command_of_the_readme() -> None:
    """To run the tests."""
    commands = [
        text.strip() for language, _, text in blocks(ROOT / "README.md") if language == "bash"
    ]

    assert commands[1].endswith("-m pytest")
    assert commands[1] in (ROOT / ".ci" / "run").read_text()


@pytest.mark.torch
@pytest.mark.parametrize(
    ("mesh", "program"),
    [
        ("dp=2,tp=2", "fsdp_tp.py"),
        pytest.param("dp=2,tp=4", "fsdp_tp.py", marks=pytest.mark.nightly),
        pytest.param("replicate=2,shard=4", "hsdp.py", marks=pytest.mark.nightly),
    ],
)
def test_examples_learn(mesh: str, program: str) -> None:
    """On CPU, the loss falls to a fifth."""
    from tests.kit import run_meshrun

    ours = run_meshrun(
        "--mesh", mesh, "--device", "cpu", "--no-prefix", ROOT / "examples" / program
    )
    losses = [float(line.split()[-1]) for line in ours.stdout.splitlines()]

    assert (ours.returncode, ours.stderr) == (0, "")
    assert losses[-1] < losses[0] / 5


@pytest.mark.torch
@pytest.mark.nightly
def test_the_recording_is_what_a_run_prints(tmp_path: Path) -> None:
    """Of the README's programs, except for numbers, order and meshrun's own messages."""
    images = ROOT / "docs" / "images"
    subprocess.run([sys.executable, images / "record.py", tmp_path], check=True)

    def words(picture: Path) -> list[str]:
        texts = re.findall(r">([^<]+)</text>", picture.read_text())
        whole = (text for text in texts if text.strip() and not text.startswith("meshrun:"))
        return sorted(re.sub(r"\d+", "N", text) for text in whole)

    assert words(tmp_path / "run.svg") == words(images / "run.svg")


GLOSSARY = (
    *("rank", "local rank", "node", "mesh dim", "coordinate", "group", "zygote", "generation"),
    *("coordinator", "spare", "preemption", "drain"),
)


def test_the_glossary_has_every_term() -> None:
    """The README links to it."""
    page = (ROOT / "docs" / "reference" / "glossary.md").read_text()

    assert [term for term in GLOSSARY if f"| **{term}** |" not in page] == []
    assert "docs/reference/glossary.md" in (ROOT / "README.md").read_text()
