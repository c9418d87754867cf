"""Records a real run in a terminal as a picture: ``python docs/images/record.py [FOLDER]``.

Run it in a checkout with the extra ``test``. It types the README's commands into a shell, waits for
them, and draws what the screen shows.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.terminal import Terminal  # noqa: E402 - of this checkout

COLUMNS = 92
COMMANDS = ("meshrun --mesh dp=2,tp=4 hello.py", "meshrun --mesh dp=2,tp=4 broken.py")
_THEME = TerminalTheme(
    (28, 30, 38), (222, 224, 230),
    [(28, 30, 38), (240, 113, 120), (126, 200, 120), (229, 192, 101),
     (110, 164, 240), (198, 140, 230), (86, 190, 200), (222, 224, 230)],
)  # fmt: skip
_COLORS = {"default": None, "brown": "yellow"}
"""Colors that pyte calls otherwise, or that are none."""


def record(commands: Sequence[str], folder: Path) -> Text:
    """Run commands in a shell, one after the other, and return what its terminal shows."""
    env = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        # Each prompt puts its number into the window's title, which the picture does not have.
        "PS1": r"\[\e[1;32m\]$\[\e[0m\] \[\e]2;prompt \#\a\]",
        "MESHRUN_DEVICE": "cpu", "HOME": str(folder),
    }  # fmt: skip
    shell = Terminal(["bash", "--norc", "--noprofile"], env, COLUMNS, 60)
    try:
        for number, words in enumerate([f"cd {folder}; clear", *commands], 1):
            shell.wait_for_title(f"prompt {number}")
            shell.type(f"{words}\n")
        shell.wait_for_title(f"prompt {len(commands) + 2}")
        lines = [_line(shell, row) for row in range(len(shell.shown))]
    finally:
        shell.end()
    return Text("\n").join(_elsewhere(line, folder) for line in lines if line.plain != "$")


def _elsewhere(line: Text, folder: Path) -> Text:
    """Return a line without the names of this machine."""
    plain = line.plain.replace(str(folder), "/home/ada")
    plain = plain.replace(f"on {os.uname().nodename}, pid", "on node0, pid")
    return line if plain == line.plain else Text(plain)


def _line(shell: Terminal, row: int) -> Text:
    chars = [shell.screen.buffer[row][column] for column in range(COLUMNS)]
    line = Text()
    for (color, bold), alike in groupby(chars, lambda char: (char.fg, char.bold)):
        style = Style(color=_COLORS.get(color, color), bold=bold)
        line.append("".join(char.data for char in alike), style)
    line.rstrip()
    return line


def draw(text: Text) -> str:
    """Return a picture of a terminal with the text, which asks no other site for a font."""
    console = Console(
        width=COLUMNS,
        record=True,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    console.print(text, soft_wrap=True)
    drawn = console.export_svg(title="meshrun", theme=_THEME, unique_id="run")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL).replace(
        "Fira Code, monospace", "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
    )


def main(target: Path) -> None:
    """Draw the picture into a folder."""
    readme = (ROOT / "README.md").read_text()
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="meshrun_") as name:
        folder = Path(name)
        for script, text in re.findall(r"```python file=(\S+)\n(.*?)```", readme, re.DOTALL):
            (folder / script).write_text(text)
        (target / "run.svg").write_text(draw(record(COMMANDS, folder)))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent)
