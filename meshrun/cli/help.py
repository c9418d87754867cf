"""``-h`` and ``--help``: the table of options as text, without rich, whose import is slow."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any

from meshrun.cli.option import Option, ParsedOptions
from meshrun.cli.options import TOPICS
from meshrun.errors import UsageError
from meshrun.host.stderr import has_colors
from meshrun.wording import DOCS, either

ABOUT = "Launch a PyTorch program on every device and hand it a ready DeviceMesh."
SYNOPSIS = ("[OPTIONS] SCRIPT [ARGS]...", "[OPTIONS] -m MODULE [ARGS]...")
EXAMPLES = {
    "meshrun --mesh 2x4 --names dp,tp train.py --lr 1e-3": "8 ranks",
    "meshrun --mesh dp=-1,tp=8 --nnodes 2 -n train.py": "print the plan",
    "meshrun --mesh dp=-1,tp=8 --hosts a,b train.py": "over ssh",
    "meshrun --nproc-per-node 8 train.py": "as torchrun",
}
SCRIPT = (
    "In train.py, `from meshrun import current_mesh` and `mesh = current_mesh()` give the"
    " torch.distributed DeviceMesh that was built before its first line. Without --mesh, meshrun"
    " does what torchrun does."
)
ENVIRONMENT = (
    "Options can also be set in the environment: meshrun's own as MESHRUN_MESH, MESHRUN_SHOW"
    " and so on, torchrun's as PET_NPROC_PER_NODE and so on. --dry-run shows which value was used."
)
LINK = re.compile(r"\[([^]]+)\]\(([^)#]+?)(?:\.md)?(#[^)]*)?\)")
"""A link of the reference, in Markdown."""
_POINTER = re.compile(rf"See (?:{LINK.pattern}(?: and )?)+\.")
_COLUMN, _BRIEF_COLUMN = 34, 26
"""Columns at which descriptions start."""
_MIN_WIDTH, _MAX_WIDTH = 40, 110


def render_help(table: type[ParsedOptions], topic: str = "--help") -> str:
    """Return a page of help, as wide as the terminal.

    The topic is ``-h`` for the common options, ``--help`` for all, a name in ``TOPICS``, or that of
    an option.

    Raises:
        UsageError: If there is no such topic.
    """
    width = max(min(shutil.get_terminal_size().columns, _MAX_WIDTH), _MIN_WIDTH)
    if topic in TOPICS:
        panels = TOPICS[topic]
        return "\n\n".join([*_panels(table, panels, width), f"Docs: {DOCS}/{_page_of(panels[0])}"])
    if topic not in ("-h", "--help"):
        return _details(_find(table, topic), width)
    usage = f"{_bold('Usage:')} " + "\n       ".join(f"meshrun {words}" for words in SYNOPSIS)
    longest = max(map(len, EXAMPLES))
    examples = (f"  {words.ljust(longest)}  # {why}" for words, why in EXAMPLES.items())
    parts = [_fill(ABOUT, width), usage, "\n".join([_bold("Examples:"), *examples])]
    if topic == "-h":
        return "\n\n".join([*parts, _common_options(table), _more("--help", width)])
    everything = dict.fromkeys(row.panel for row in table.rows())
    return "\n\n".join(
        [
            *parts,
            _fill(SCRIPT, width),
            *_panels(table, everything, width),
            _fill(ENVIRONMENT, width),
            _more("-h", width),
        ]
    )


def _bold(text: str) -> str:
    return f"\033[1m{text}\033[0m" if has_colors(1) else text


def _common_options(table: type[ParsedOptions]) -> str:
    lines = [_bold("Common options:")]
    for row in table.rows():
        if row.brief:
            text = row.brief + _default(row)
            fitting = text if len(text) <= 80 - _BRIEF_COLUMN else row.brief
            lines.append(_beside(row, [fitting], _BRIEF_COLUMN))
    return "\n".join(lines)


def _more(other: str, width: int) -> str:
    what = {"--help": "all options", "-h": "the common options"}[other]
    topics = textwrap.fill(
        f"meshrun --help TOPIC   an option, or {', '.join(TOPICS)}",
        min(80, width),
        initial_indent="  ",
        subsequent_indent=" " * 25,
        break_on_hyphens=False,
    )
    return f"More:\n  {f'meshrun {other}'.ljust(23)}{what}\n{topics}\n  {DOCS}"


def _panels(table: type[ParsedOptions], panels: Iterable[str], width: int) -> Iterator[str]:
    column = min(_COLUMN, width // 2)
    for panel in panels:
        lines = [_bold(f"{panel}:")]
        for row in table.rows():
            if row.panel == panel:
                text = _fill(row.help + _default(row), width - column)
                lines.append(_beside(row, text.splitlines(), column))
        yield "\n".join(lines)


def _beside(row: Option[Any], lines: list[str], column: int) -> str:
    """Return an option's flags, with lines of text beside or below them."""
    flags = ", ".join(row.flags)
    first = f"{'  ' if row.short else '      '}{flags} {row.metavar}".rstrip()
    if len(first) < column - 1:
        first = first.ljust(column) + lines.pop(0)
    return "\n".join(
        [first.replace(flags, _bold(flags), 1), *(" " * column + line for line in lines)]
    )


def _default(row: Option[Any]) -> str:
    has_default = row.unset and row.takes_value
    return f" [default: {row.unset.replace('`', '')}]" if has_default else ""


def _find(table: type[ParsedOptions], topic: str) -> Option[Any]:
    """Return the option that a name, or its beginning, means, with or without leading dashes."""
    names = {name.lstrip("-"): row for row in table.rows() for name in row.flags}
    name = topic.lstrip("-").replace("_", "-")
    if name not in names:
        known: dict[str, object] = {**TOPICS, **names}
        near = [word for word in known if word.startswith(name)]
        if len(near) == 1 and near[0] in names:
            return names[near[0]]
        near = near or get_close_matches(name, known, n=2, cutoff=0.7)
        meant = either([f"`{word}`" for word in near])
        raise UsageError(
            f"no help topic or option `{topic}`",
            hint=f"did you mean {meant}?" if near else f"topics are {', '.join(TOPICS)}",
        )
    return names[name]


def _details(row: Option[Any], width: int) -> str:
    """Return what the reference says about an option, with the addresses of its pages."""
    flags = f"{_bold(', '.join(row.flags))} {row.metavar}".rstrip()
    text = LINK.sub(r"\1", _POINTER.sub("", f"{row.help} {row.details}"))
    lines = [*_fill(" ".join(text.split()), width - 4).splitlines(), ""]
    if row.takes_value:
        lines.append(f"Default:  {row.unset.replace('`', '') or 'none'}")
    if row.variable:
        lines.append(f"Variable: {row.variable}")
    pages = {page: f"{page}.html{anchor}" for _, page, anchor in LINK.findall(row.details)}
    for page in pages.values() or [_page_of(row.panel)]:
        below = page[3:] if page.startswith("../") else f"reference/{page.rpartition('/')[2]}"
        lines.append(f"Docs:     {DOCS}/{below}")
    return "\n".join([flags, *(f"    {line}".rstrip() for line in lines)])


def _page_of(panel: str) -> str:
    anchor = panel.lower().replace(" ", "-").replace(",", "")
    return f"reference/command-line.html#{anchor}"


def _fill(text: str, width: int) -> str:
    return textwrap.fill(text, width, break_on_hyphens=False, break_long_words=False)
