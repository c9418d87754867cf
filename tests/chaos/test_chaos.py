"""Whatever is hit, and when: no process is left, the cause is named, no line is lost.

``MESHRUN_CHAOS`` is the number of cases, ``MESHRUN_CHAOS_FROM`` the first case.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.chaos.conducting import Controller
from tests.chaos.drawing import Case, draw
from tests.chaos.expecting import Expected, expect
from tests.kit import MARK, Running, marked_processes, wait_until
from tests.variations import ordinary

ORDINARY = (0, 3, 8, 14, 16, 17, 18, 19, 20, 22, 34)
"""Each kind of fault, and signals to launcher, zygote, store and rank; the rest of 40 are nightly,
unless a variable requests cases."""
COUNT = int(os.environ.get("MESHRUN_CHAOS", "40"))
FIRST = int(os.environ.get("MESHRUN_CHAOS_FROM", "0"))
NUMBERS = range(FIRST, FIRST + COUNT)
ASKED = NUMBERS if {"MESHRUN_CHAOS", "MESHRUN_CHAOS_FROM"} & os.environ.keys() else ORDINARY
_OURS = re.compile(r'File "[^"]*/meshrun/[a-z_/]+\.py"|this is a bug in meshrun|Traceback')


@pytest.mark.parametrize("number", ordinary(NUMBERS, *ASKED))
def test_whatever_is_hit(number: int, tmp_path: Path) -> None:
    """Exit code, cause and output are right; the fixture checks for leftover processes."""
    case = draw(number)
    print(f"\nMESHRUN_CHAOS=1 MESHRUN_CHAOS_FROM={number} python -m pytest tests/chaos  # {case}")
    expected = expect(case)
    controller = Controller(case, expected, tmp_path)
    code, running = controller.run()
    mark = os.environ[MARK]  # processes killed by guards end shortly after the launcher
    wait_until(lambda: not marked_processes(mark), lambda: "\n".join(marked_processes(mark)))
    print(running.stdout[-2000:], running.stderr[-6000:], sep="\n--- stderr:\n")

    assert code in expected.codes
    for text in expected.messages:
        assert any(each in running.stderr for each in text.split("|")), text
    check_no_trace(case, running)
    check_lines(case, expected, running, tmp_path)
    check_report(tmp_path / "report.json", code)
    assert [name for name in os.listdir("/dev/shm") if "meshrun" in name] == []


def check_no_trace(case: Case, running: Running) -> None:
    """Only the program's exceptions have a traceback, and it has no frames of meshrun."""
    text = running.stderr
    if case.watch or case.fault in ("disk", "ctrl_c"):
        text = text.replace("Traceback (most recent call last)", "")
    found = _OURS.search(text + running.stdout)

    assert found is None, found


def check_lines(case: Case, expected: Expected, running: Running, folder: Path) -> None:
    """Each flushed line is in the files, if there are any, and printed, if it must be."""
    if case.fault in ("disk", "inodes"):
        return
    texts = []
    if case.output != "redirect" and expected.all_lines:
        texts.append(running.stdout)
    if case.output != "console":
        files = sorted((folder / "logs").rglob("stdout.log"))
        texts.append("".join(path.read_text() for path in files))
    for text in texts:
        printed = set(re.findall(r"line (\d+ \d+ \d+)\n", text))
        missing = [line for line in _flushed(folder) if line not in printed]

        assert missing == []


def _flushed(folder: Path) -> list[str]:
    """Return the lines that ranks have certainly flushed."""
    lines = []
    for path in folder.glob("count.*"):
        _, generation, rank = path.name.split(".")
        lines += [f"{generation} {rank} {line}" for line in range(int(path.read_text() or 0))]
    return lines


def check_report(path: Path, code: int) -> None:
    """The report, if there is one, has the launcher's exit code."""
    if path.exists():
        assert json.loads(path.read_text())["exit_code"] == code
