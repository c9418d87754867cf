"""The reference's tables of options are generated from the table in the code.

``UPDATE_GOLDEN=1 python -m pytest tests/golden`` regenerates them.
"""

import inspect
import os
import re
import shutil
import subprocess
import sys

import pytest

from meshrun import errors
from meshrun.api import launch as api
from meshrun.cli.command import read_options
from meshrun.cli.completion import render_completion
from meshrun.cli.help import render_help
from meshrun.cli.option import Option, ParsedOptions
from meshrun.cli.options import MESH, TOPICS, Options
from meshrun.mesh import current_layout
from meshrun.plan.choices import JOB_SCHEDULERS, TEMPLATE_FIELDS
from meshrun.plan.parse import parse_integer
from meshrun.report import node_history
from meshrun.ssh.remote_command import EXPORTED
from meshrun.submit.manifests import KINDS
from meshrun.supervisor import stragglers
from meshrun.wording import DOCS
from tests.golden.man_page import render_man_page
from tests.kit import ROOT

REFERENCE = ROOT / "docs" / "reference"
BLOCK = re.compile(r"(<!-- options -->\n).*?(<!-- end of options -->)", re.DOTALL)


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def render_rows(table: type[ParsedOptions], panel: str) -> str:
    """Return a panel's options as a Markdown table."""
    lines = ["| option | default | meaning |", "| --- | --- | --- |"]
    for row in table.rows():
        if row.panel == panel:
            short = f"`{row.short}`, " if row.short else ""
            names = f"{short}`{f'{row.flag} {row.metavar}'.rstrip()}`" + " *t*" * (
                row.family == "PET"
            )
            unset = row.unset or ("none" if row.takes_value else "off")
            lines.append(
                f"| {cell(names)} | {cell(unset)} | {cell(f'{row.help} {row.details}'.rstrip())} |"
            )
    return "\n".join([*lines, ""])


def render_variables(table: type[ParsedOptions]) -> str:
    """Return the variables of all options as a Markdown table, with a row for each panel."""
    lines = ["| options | variables |", "| --- | --- |"]
    for panel in dict.fromkeys(row.panel for row in table.rows() if row.variable):
        names = (f"`{row.variable}`" for row in table.rows() if row.panel == panel and row.variable)
        lines.append(f"| {panel} | {', '.join(names)} |")
    return "\n".join([*lines, ""])


def fill(page: str, *blocks: str) -> str:
    """Return a page with the text between its marks replaced by ``blocks``."""
    rest = list(blocks)
    filled = BLOCK.sub(lambda found: found[1] + rest.pop(0) + found[2], page)
    assert not rest, "this page lacks marks for some tables"
    return filled


def pages(table: type[ParsedOptions]) -> dict[str, list[str]]:
    panels = dict.fromkeys(row.panel for row in table.rows())
    return {
        "command-line.md": [render_rows(table, panel) for panel in panels],
        "environment.md": [render_variables(table)],
    }


@pytest.mark.parametrize("name", ["command-line.md", "environment.md"])
def test_the_reference_agrees_with_the_table(name: str) -> None:
    """It has every option, in its panel of the help, with its default and variable."""
    page = (REFERENCE / name).read_text()
    made = fill(page, *pages(Options)[name])
    if os.environ.get("UPDATE_GOLDEN"):
        (REFERENCE / name).write_text(made)

    assert made == (REFERENCE / name).read_text()
    for panel in dict.fromkeys(row.panel for row in Options.rows()):
        assert name != "command-line.md" or f"\n## {panel}\n" in page


def test_the_manual_page_agrees_with_the_table() -> None:
    """And mandoc reports no warning, apart from the missing date."""
    made = render_man_page(Options, (REFERENCE / "exit-codes.md").read_text())
    if os.environ.get("UPDATE_GOLDEN"):
        (REFERENCE / "meshrun.1").write_text(made)

    assert made == (REFERENCE / "meshrun.1").read_text()
    if shutil.which("mandoc"):
        checked = subprocess.run(
            ["mandoc", "-T", "lint", "-W", "warning"],
            input=made, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert [line for line in checked.stdout.splitlines() if "date" not in line] == []


def test_launch_takes_the_options_of_the_table() -> None:
    """Its types name options, and a few parameters of its own; its docstring describes each."""
    own = {"program", "args", "kwargs", "env", "cwd", "options"}
    named = set(inspect.signature(api.launch).parameters)
    about = (inspect.getdoc(api.launch) or "").partition("Returns:")[0]

    assert named - own <= {row.name for row in Options.rows()}
    assert named == set(api.LaunchOptions.__annotations__) | own | {"module"}
    assert named == set(re.findall(r"^    (\w+): ", about, re.MULTILINE))
    with pytest.raises(TypeError, match="unexpected keyword argument 'nodes'"):
        api.launch("train.py", nodes=2)  # type: ignore[call-overload]


def test_every_exit_code_of_an_error_is_on_its_page() -> None:
    """With its own row."""
    page = (REFERENCE / "exit-codes.md").read_text()
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.exit_code for kind in kinds if hasattr(kind, "exit_code")}

    assert {1, 2, 69, 70, 71, 124} <= codes
    assert [code for code in codes if f"\n| {code} | " not in page] == []


def test_lists_and_numbers_in_prose_are_those_of_the_code() -> None:
    """Names that pages and the help list, and limits that they state."""
    hosts = (ROOT / "docs" / "how-to" / "hosts.md").read_text()
    passed = hosts.partition("passes these variables to every host:")[2].partition(
        "those that `--"
    )[0]
    shards = (REFERENCE / "layout.md").read_text().partition("By default, the dims named")[2]
    fields = (REFERENCE / "logs.md").read_text() + Options.log_line_prefix_template.help

    assert re.findall("`([A-Z_]+)`", passed) == [name.rstrip("*") for name in EXPORTED]
    for text in (
        shards.partition(" split the data")[0],
        inspect.getdoc(current_layout.data_shard) or "",
    ):
        named = re.findall(r"`(\w+)`", text.partition("else the mesh's dims")[2] or text)
        assert {*current_layout._DATA_DIMS} <= {*named}
    assert {*re.findall(r"\$\{(\w+)\}", fields)} == {*TEMPLATE_FIELDS}
    assert f" {stragglers._SHARE * 100:g} % " in Options.stragglers.help
    assert f" {node_history._DAYS} days " in Options.max_node_failures.details
    assert ("slurm", *KINDS) == JOB_SCHEDULERS


OTHERS_OPTIONS = {
    "--cpus-per-task", "--distribution", "--force-conflicts", "--gpu-reset",
    "--gpus-per-task", "--gres", "--job-name", "--lr", "--map-by", "--meshrun", "--native",
    "--nproc", "--ntasks-per-node", "--parsable", "--partition", "--pdb", "--pid",
    "--server-side", "--shm-size",
}  # fmt: skip
"""Options of other programs in packages that seldom name any."""


def test_options_that_messages_and_comments_mention_exist() -> None:
    """Most packages may not import the table, so mypy cannot tell."""
    files = (ROOT / "meshrun").rglob("*.py")
    ours = [file for file in files if file.parent.name not in ("submit", "cluster", "host")]
    named = {
        flag
        for file in ours
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]\b(?![_-])", file.read_text())
    }

    assert named - {row.flag for row in Options.rows()} == OTHERS_OPTIONS


@pytest.mark.torch
def test_every_option_of_torchrun_is_a_row() -> None:
    """In each spelling, with or without a value as there, and with the same variable."""
    from torch.distributed.run import get_args_parser

    rows = {flag: row for row in Options.rows() for flag in row.flags}
    for action in get_args_parser()._actions:
        for name in action.option_strings:
            row = rows[name.replace("_", "-")]
            assert row.takes_value == (action.nargs != 0), name
            is_of_a_launch = row not in (Options.help, Options.print_completion)
            assert not is_of_a_launch or row.variable == f"PET_{action.dest.upper()}", name


FIXED = ("  meshrun ", "    TORCH")
"""In lines of the help that are not wrapped: commands, and names of variables."""


@pytest.mark.parametrize("topic", ["-h", "--help", "mesh", "view"])
@pytest.mark.parametrize("columns", [40, 64, 80, 300])
def test_the_help_fits_a_terminal(
    columns: int, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text and options are no wider; flags are bold if the terminal has colors."""
    monkeypatch.setenv("COLUMNS", str(columns))
    plain = render_help(Options, topic)
    monkeypatch.setattr("meshrun.cli.help.has_colors", lambda _descriptor: True)
    bold = render_help(Options, topic)

    lines = [line for line in plain.splitlines() if "https://" not in line]
    assert max(map(len, lines)) <= max(columns, 80)
    wrapped = [line for line in lines if not any(text in line for text in FIXED)]
    assert max(map(len, wrapped)) <= (80 if topic == "-h" else max(columns, 64))
    assert f"\033[1m--{'view' if topic == 'view' else 'mesh'}\033[0m" in bold
    assert re.sub(r"\033\[\d?m", "", bold) == plain


def test_every_option_has_a_topic_and_a_page() -> None:
    """Together the topics cover all options, and each option has its own page of help."""
    of_topics = {panel for panels in TOPICS.values() for panel in panels}
    assert {row.panel for row in Options.rows()} == of_topics
    for row in Options.rows():
        if row.name in TOPICS:
            continue
        page = render_help(Options, row.name)
        assert page.startswith(", ".join(row.flags))
        assert (f"Variable: {row.variable}\n" in page) == bool(row.variable)
        for file in re.findall(rf"{DOCS}/(.+)\.html", page):
            assert (ROOT / "docs" / f"{file}.md").is_file()


def test_the_help_imports_little() -> None:
    """Neither rich nor what a launch needs, so it appears at once."""
    words = ["-X", "importtime", "-m", "meshrun", "--help"]
    ours = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in ours.stderr.splitlines()}

    assert "meshrun.cli.options" in imported
    unneeded = {"rich", "torch", "socket", "meshrun.cli.read", "meshrun.plan.request"}
    unneeded |= {"meshrun.protocol.result", "meshrun.report", "meshrun.supervisor"}
    assert imported & unneeded == set()


class _Extended(Options):
    cool_down = Option(parse_integer, 3, "N", MESH, "How long to cool down.", short="-c")


def test_a_new_option_is_one_entry() -> None:
    """It appears in the help, completion, reference and environment, and its value is typed."""

    def read(*args: str, **env: str) -> int:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            return read_options(_Extended, [*args, "train.py"]).cool_down

    assert read("-c", "5") == read("--cool_down=5") == read(MESHRUN_COOL_DOWN="5") == 5
    assert read() == 3
    assert re.search(
        r"-c, --cool-down N +How long to cool down. \[default: 3\]\n", render_help(_Extended)
    )
    assert all("cool-down" in render_completion(shell, _Extended) for shell in ("bash", "zsh"))
    made = pages(_Extended)
    assert "| `-c`, `--cool-down N` | `3` | How long to cool down. |" in made["command-line.md"][0]
    assert "`MESHRUN_COOL_DOWN`" in made["environment.md"][0]
