"""When a warm server is as good as a fresh start: each part of the key changed once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from meshrun.plan.rank_program import Program
from meshrun.protocol.packing import pack, unpack
from meshrun.warm.identity import (
    FileParts,
    Requirements,
    ServerDescription,
    changed_library,
    digests,
    find_mismatch,
    loaded_files,
    stat_of,
    words_of,
)
from meshrun.warm.inherited import fixed_by_parent, read_inherited
from meshrun.warm.server_folder import ServerFolder
from meshrun.warm.warm_messages import ZygoteSpec
from meshrun.worker.import_record import (
    ImportRecord,
    read_import_record,
    record_imports,
    write_import_record,
)

READ = ["HF_HOME", "TORCH_LOGS"]
ENVIRONMENT = {"HF_HOME": "/a", "TORCH_LOGS": "x", "LD_PRELOAD": "y", "OTHER": "z"}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[ServerDescription, Requirements, Path]:
    """Give a server, a launch that may use it, and the launch's program."""
    (program := tmp_path / "program.py").write_text("import transformers")
    server = ServerDescription(
        pid=1,
        born="1",
        began=0.0,
        idle_s=600.0,
        interpreter="python",
        fixed={"Uid": "0"},
        base=["torch", "numpy"],
        extra=["transformers"],
        environment=digests(ENVIRONMENT, READ),
        read=READ,
        sources={str(program): FileParts(stat=stat_of(str(program)), words=["transformers"])},
    )
    wanted = Requirements(
        interpreter="python",
        fixed={"Uid": "0"},
        modules=["torch", "torch.nn", "numpy", "transformers.models"],
        environment=ENVIRONMENT,
        own_files=[str(program)],
    )
    return server, wanted, program


def test_nothing_else_matters(pair: tuple[ServerDescription, Requirements, Path]) -> None:
    server, wanted, program = pair
    assert find_mismatch(server, wanted) is None
    program.write_text("import transformers  # and a comment\nprint('HF_TOKEN')\n")
    other = {**ENVIRONMENT, "OTHER": "w", "MESHRUN_X": "1"}
    assert find_mismatch(server, replace(wanted, environment=other)) is None


CHANGES: list[tuple[dict[str, Any], str, int | None]] = [
    ({"interpreter": "python3.13"}, "it has a different interpreter", None),
    ({"fixed": {"Uid": "1"}}, "it has a different Uid", 1),
    ({"fixed": {"cgroup": "/x"}}, "it has a different cgroup", 1),
    ({"modules": ("torch", "lightning")}, "it holds different packages", None),
    ({"modules": ("torch",)}, "it holds different packages", None),
    ({"own_files": ["/other.py"]}, "it holds the packages of another program", None),
    ({"environment": {**ENVIRONMENT, "HF_HOME": "/b"}}, "HF_HOME has changed", 1),
    ({"environment": {**ENVIRONMENT, "PYTHONPATH": "/b"}}, "PYTHONPATH has changed", 1),
    ({"environment": {**ENVIRONMENT, "LC_ALL": "C"}}, "LC_ALL has changed", 1),
    ({"environment": {**ENVIRONMENT, "MKL_DYNAMIC": "0"}}, "MKL_DYNAMIC has changed", 1),
    ({"environment": {"HF_HOME": "/a"}}, "LD_PRELOAD has changed", 2),
    ({"changed": ["OTHER", "HF_HOME"]}, "the program sets HF_HOME", 0),
]


@pytest.mark.parametrize(("change", "why", "distance"), CHANGES, ids=[row[1] for row in CHANGES])
def test_a_change_of_any_part_of_the_key_is_a_mismatch(
    pair: tuple[ServerDescription, Requirements, Path],
    change: dict[str, Any],
    why: str,
    distance: int | None,
) -> None:
    server, wanted, _ = pair
    unlike = find_mismatch(server, replace(wanted, **change))
    assert unlike is not None
    assert (unlike.reason, unlike.distance) == (why, distance)


@pytest.mark.parametrize("how", ["longer", "as long", "gone", "unlisted", "a pipe"])
def test_a_library_that_changes(
    pair: tuple[ServerDescription, Requirements, Path], tmp_path: Path, how: str
) -> None:
    """Or whose state is no longer known."""
    (library := tmp_path / "library.py").write_text("1")
    server, _, _ = pair
    folder = ServerFolder(str(tmp_path / "place"))
    folder.describe(server, {str(library): stat_of(str(library)) or (0, 0)})
    assert folder.changed_library(server) is None

    why = f"`{library}` has changed"
    if how == "gone":
        library.unlink()
    elif how in ("unlisted", "a pipe"):
        (files := tmp_path / "place" / f"{server.pid}.files").write_text("[]")
        if how == "a pipe":
            files.unlink()
            os.mkfifo(files)
        why = "the list of its files cannot be read"
    else:
        library.write_text("12" if how == "longer" else "2")
        os.utime(library, ns=(1, 1))
    unlike = folder.changed_library(server)
    folder.close()
    assert unlike is not None
    assert (unlike.reason, unlike.is_permanent) == (why, True)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_server_that_is_ready_is_not_starting(
    pair: tuple[ServerDescription, Requirements, Path], tmp_path: Path, is_late: bool
) -> None:
    """Even if its launcher, on a busy machine, records its start later."""
    server = replace(pair[0], pid=os.getpid())
    folder = ServerFolder(str(tmp_path / "place"))
    steps = [lambda: folder.record_start(server.pid), lambda: folder.describe(server, {})]
    for step in reversed(steps) if is_late else steps:
        step()
    assert folder.starting() == []
    assert folder.describes(server.pid)
    folder.close()


@pytest.mark.parametrize(
    ("new", "is_other"),
    [("outputs/", False), ("model.pt", False), ("util.py", True), ("lib/__init__.py", True)],
)
def test_a_folder_of_the_users_that_is_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: str, is_other: bool
) -> None:
    """A file that a program writes there is no change, unless it can be imported."""
    (tmp_path / "train.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    files = {str(tmp_path): loaded_files({})[str(tmp_path)]}
    if new.endswith("/"):
        (tmp_path / new).mkdir()
    else:
        (tmp_path / new).parent.mkdir(exist_ok=True)
        (tmp_path / new).touch()
    unlike = changed_library(files)
    assert (unlike is not None) is is_other
    if unlike is not None:
        assert unlike.reason == f"`{tmp_path}` has changed"


@pytest.mark.parametrize(
    "source", ["import transformers, peft", "", "import transformers\nset('HF_HOME')", "(", "\0"]
)
def test_a_program_that_changes(
    pair: tuple[ServerDescription, Requirements, Path], source: str
) -> None:
    """In its imports or in the variables that it names, or so that it is no longer Python."""
    server, wanted, program = pair
    program.write_text(source)
    unlike = find_mismatch(server, wanted)
    assert unlike is not None
    assert unlike.is_permanent
    assert str(program) in unlike.reason
    without = replace(server, extra=[], base=[*server.base, "transformers"])
    assert find_mismatch(without, wanted) is None  # torch alone imports it, in any run


def test_words(tmp_path: Path) -> None:
    (path := tmp_path / "p.py").write_text(
        "import a.b as c\nfrom .d import e\nfrom f import g, h\nx = 'HF_HOME', 'NO', b'HF_HOME'\n"
    )
    assert words_of(str(path), READ) == [".d.e", "HF_HOME", "a.b", "f.g", "f.h"]
    assert words_of(str(tmp_path / "none.py"), READ) is None


def test_what_a_zygotes_spec_carries_survives() -> None:
    """Including text that is not UTF-8."""
    inherited = read_inherited({"A": "b\udcff"})
    program = Program(kind="module", target="t", args=("\udcfe",))
    spec = ZygoteSpec(program=program, mark="m", inherited=inherited)
    assert unpack(pack(spec), ZygoteSpec) == spec
    assert signal.SIGPIPE in inherited.ignored  # which every interpreter ignores
    assert fixed_by_parent()["Uid"]
    for text in (b"", b"{}", b'["ZygoteSpec", {}]', pack(spec).replace(b'"module"', b'"shell"')):
        with pytest.raises(ValueError, match="not a message"):
            unpack(text, ZygoteSpec)


def test_which_imports_are_recorded(tmp_path: Path) -> None:
    import threadpoolctl  # which ranks import if they have more than one core each

    from tests import kit

    installed = pytest
    modules = {"pytest": installed, "other_name": installed, "tests.kit": kit, "json": os}
    modules["threadpoolctl"] = threadpoolctl
    record = record_imports(modules, {"A": "1", "B": "2"}, {"A": "1", "C": "3"})
    assert record.modules == ["pytest"]
    assert record.own_files == [kit.__file__]
    assert sorted(record.changed) == ["B", "C"]
    write_import_record(str(tmp_path / "record"), record)
    assert read_import_record(str(tmp_path / "record")) == record
    for broken in ('{"modules": 3}', "[" * 100_000):
        (tmp_path / "broken").write_text(broken)
        assert read_import_record(str(tmp_path / "broken")) is None
    (tmp_path / "taken").mkdir()
    write_import_record(str(tmp_path / "taken"), record)
    folder = ServerFolder(str(tmp_path / "place"))
    (tmp_path / "place" / "why").mkdir()
    folder.leave_reason("any")  # as if the disk is full
    folder.close()
    assert [path.name for path in tmp_path.glob("**/*.*")] == []
    os.mkfifo(tmp_path / "pipe")
    assert read_import_record(str(tmp_path / "pipe")) is None
    assert read_import_record(str(tmp_path / "none")) is None
    write_import_record(
        str(tmp_path / "no" / "folder"), ImportRecord(modules=[], changed=[], own_files=[])
    )
