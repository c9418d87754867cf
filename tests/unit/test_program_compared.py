"""How a node describes its program, so that nodes can compare theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshrun.plan.rank_program import Program
from meshrun.rendezvous.expected_nodes import PROGRAM_FILE
from meshrun.supervisor.node_link import describe_program

KEY = b"k" * 32


def described(target: Any, *args: str, kind: Any = "script") -> dict[str, str]:
    """Return each part that must be equal on all nodes."""
    program = Program(kind=kind, target=str(target), args=args)
    return {part: said[0] for part, said in describe_program(program, {}, key=KEY).items()}


def test_a_script_is_compared_by_its_content(tmp_path: Path) -> None:
    """Not by its path; a folder is compared by its ``__main__.py``."""
    for name, text in (("a.py", "1"), ("b.py", "1"), ("c.py", "2"), ("d/__main__.py", "1")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    assert described(tmp_path / "a.py") == described(tmp_path / "b.py") == described(tmp_path / "d")
    assert described(tmp_path / "a.py") != described(tmp_path / "c.py")
    assert described(tmp_path / "a.py", "1") != described(tmp_path / "a.py", "2")


def test_a_module_is_compared_by_its_name_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in packages, none of which is imported to find it."""
    (tmp_path / "p" / "q").mkdir(parents=True)
    for name in ("p/__init__.py", "p/q/__init__.py"):
        (tmp_path / name).write_text("raise SystemExit")
    (tmp_path / "p" / "q" / "__main__.py").write_text("1")
    (tmp_path / "p" / "m.py").write_text("2")
    monkeypatch.chdir(tmp_path)
    package, module = described("p.q", kind="module"), described("p.m", kind="module")

    assert PROGRAM_FILE in package
    assert package[PROGRAM_FILE] != module[PROGRAM_FILE]
    assert described("p.none", kind="module") == {"the program": "-m p.none"}


def test_a_command_is_compared_by_its_name_or_script_without_the_interpreter(
    tmp_path: Path,
) -> None:
    """Environments may be in different folders, and binaries may differ between systems."""
    for folder, text in (("a", "#!/x/python\n1"), ("b", "#!/y/python\n1"), ("c", "#!/y/python\n2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "run").write_text(text)
        (tmp_path / folder / "run").chmod(0o755)
    a, b, c = (described(tmp_path / each / "run", kind="command") for each in "abc")

    assert a == b != c
    assert described("ls", kind="command") == {"the program": "the command ls"}


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    """The ranks could not read it again."""
    import os

    os.mkfifo(tmp_path / "pipe")

    assert described(tmp_path / "pipe") == {"the program": "a script"}


def test_secrets_do_not_cross_the_network() -> None:
    """Neither in plain text nor as a digest that can be brute-forced without the key."""
    program = Program(kind="command", target="x", args=("--api-key", "hunter2", "--token=hunter2"))
    said = describe_program(program, {}, key=KEY)

    assert "hunter2" not in str(said)
    assert (
        said["argument 2 of the program"]
        != describe_program(program, {}, key=b"other")["argument 2 of the program"]
    )


def test_the_arguments_beyond_a_limit_are_compared_together() -> None:
    """The message stays small, and the end of a long list of files still counts."""
    words = [str(number) for number in range(10_000)]
    said, other = described("x", *words), described("x", *words[:-1], "other")

    assert len(said) < 300
    assert [part for part in said if said[part] != other[part]] == ["the rest of the arguments"]
