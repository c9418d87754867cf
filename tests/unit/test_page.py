"""The tables of a dry run in terminals of any width."""

import io

import pytest
from rich.console import Console

from meshrun.console.console import Console as RanksConsole
from meshrun.host.stderr import note
from meshrun.report.page import Page, new_table

HEADERS = ("rank", "node", "local rank", "device", "dp", "tp")
ROWS = [
    (str(rank), "0", str(rank), f"cuda:{rank}", str(rank // 4), str(rank % 4)) for rank in (0, 7)
]


def shown(width: int, **last_column: str) -> list[str]:
    table = new_table()
    for header in HEADERS:
        table.add_column(header, justify="right", no_wrap=True)
    if last_column:
        table.add_column("value", overflow="fold")
    for row in ROWS:
        table.add_row(*row, *last_column.values())
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", [17, 19, 20, 40, 42, 43, 44, 80])
def test_no_header_is_cut(width: int) -> None:
    """Columns that do not fit follow below, with the first column repeated."""
    lines = shown(width)
    heads = [line.split("   ") for line in lines if line.startswith("rank")]
    found = [header.strip() for head in heads for header in head if header.strip() != "rank"]

    assert found == list(HEADERS[1:])
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= width
    assert (len(heads) == 1) == (width >= 43)
    assert sum(line.lstrip().startswith("7 ") for line in lines) == len(heads)


def test_long_text_is_wrapped() -> None:
    """Nothing of it is lost."""
    value = "abcdefghij" * 8
    lines = shown(60, value=value)
    folded = lines[lines.index("rank   value") + 2 :]

    assert "".join(folded).replace(" ", "") == f"0{value}7{value}"
    assert max(map(len, lines)) <= 60


def test_texts_of_the_user_are_shown_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    """No part of one is a tag or the name of an emoji to rich, or changes the terminal."""
    text = "[/foo] :smile: [red]x \x1b[2J\udcff"
    shown = "[/foo] :smile: [red]x \\x1b[2J\\udcff"
    table = new_table(("value",), texts=("value",))
    table.add_row(text)
    page = Page()
    page.print(text)
    page.print(table)
    note(text)
    RanksConsole().note(text)
    out, err = capfd.readouterr()

    assert [line.strip() for line in out.splitlines() if "foo" in line] == [shown] * 2
    assert err.splitlines() == [f"meshrun: {shown}"] * 2
