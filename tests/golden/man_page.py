"""The manual page, ``man meshrun``, generated from the options and the page of exit codes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshrun import __version__
from meshrun.cli.help import ABOUT, ENVIRONMENT, EXAMPLES, LINK, SCRIPT, SYNOPSIS
from meshrun.cli.option import ParsedOptions
from meshrun.wording import DOCS


def render_man_page(table: type[ParsedOptions], exit_codes: str) -> str:
    """Return the page in roff.

    Args:
        table: The options.
        exit_codes: A Markdown table of codes and their meanings.
    """
    return "\n".join(_lines(table, exit_codes)) + "\n"


def _lines(table: type[ParsedOptions], exit_codes: str) -> Iterator[str]:
    yield f'.TH MESHRUN 1 "" "meshrun {__version__}" "User Commands"'
    yield ".nh"  # do not hyphenate options
    yield from (".SH NAME", f"meshrun \\- {_roff(ABOUT[0].lower() + ABOUT[1:].rstrip('.'))}")
    yield ".SH SYNOPSIS"
    for number, words in enumerate(SYNOPSIS):
        yield from ([".br"] * bool(number) + [f"\\fBmeshrun\\fR {_roff(words)}"])
    yield from (".SH DESCRIPTION", _roff(SCRIPT))
    yield ".SH EXAMPLES"
    for words, why in EXAMPLES.items():
        yield from (".TP", f"\\fB{_roff(words)}\\fR", _roff(why))
    yield ".SH OPTIONS"
    for panel in dict.fromkeys(row.panel for row in table.rows()):
        yield f".SS {panel}"
        for row in (row for row in table.rows() if row.panel == panel):
            flags = ", ".join(f"\\fB{_roff(flag)}\\fR" for flag in row.flags)
            default = f" [default: {row.unset}]" if row.unset and row.takes_value else ""
            yield from (".TP", f"{flags} \\fI{_roff(row.metavar)}\\fR" if row.metavar else flags)
            yield _roff(f"{row.help}{default}")
    yield from (".SH ENVIRONMENT", _roff(ENVIRONMENT), ".SH EXIT STATUS")
    for code, meaning in re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", exit_codes, re.MULTILINE)[2:]:
        yield from (".TP", f"\\fB{_roff(code)}\\fR", _roff(meaning))
    yield from (".SH SEE ALSO", _roff(DOCS))


def _roff(text: str) -> str:
    """Return Markdown as roff: code in bold, links as their text."""
    plain = LINK.sub(r"\1", text).replace("\\", "\\e").replace("-", "\\-")
    coded = re.sub(r"`([^`]+)`", r"\\fB\1\\fR", plain)
    return re.sub(r"^(?=[.'])", r"\\&", coded, flags=re.MULTILINE)
