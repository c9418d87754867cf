"""Environment variables: bad values, and names that meshrun does not know."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import meshrun
from meshrun.cli.options import Options
from meshrun.cli.read import check_other_options
from meshrun.errors import UsageError
from meshrun.host import rank_variables
from meshrun.host.own_variables import BETWEEN_LAUNCHERS, USER_VARIABLES
from tests.kit import ROOT

NAME = re.compile(r"\bMESHRUN_[A-Z_]*[A-Z]\b")


def from_variables(env: dict[str, str]) -> Options:
    """Return the options that these variables alone set, as the command line reads them."""
    rows = [row for row in Options.rows() if row.variable in env]
    texts: dict[str, Any] = {
        row.name: (env[row.variable],) if row.repeats else env[row.variable] for row in rows
    }
    return Options(texts, {row.name: str(row.variable) for row in rows}, env)


def unknown(env: dict[str, str]) -> list[str]:
    """Return the notes on variables of which meshrun knows nothing."""
    return list(Options({}, {}, env).unknown_variables())


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("MESHRUN_MISH", "; did you mean MESHRUN_MESH?"),
        ("MESHRUN_MAX_RESTARTS", "; did you mean PET_MAX_RESTARTS?"),
        ("MESHRUN_MAX_RESTART", "; did you mean PET_MAX_RESTARTS?"),
        ("MESHRUN_NPROC_PER_NODE", "; did you mean PET_NPROC_PER_NODE?"),  # one of ranks only
        ("MESHRUN_NUM_NODES", "; did you mean PET_NNODES?"),
        ("MESHRUN_SECRETFILE", "; did you mean MESHRUN_SECRET_FILE?"),
        ("MESHRUN_SUBMIT", "; --submit has no variable, pass it on the command line"),
        ("MESHRUN_WATCH", "; --watch has no variable, pass it on the command line"),
        ("MESHRUN_XYZ", ""),
        ("PET_MESH", "; did you mean MESHRUN_MESH?"),
        ("PET_N_PROC_PER_NODE", "; did you mean PET_NPROC_PER_NODE?"),
        ("PET_DATA_DIR", None),
        ("PET_PRINT_COMPLETION", None),
        ("PET_XYZ", None),
        ("PETS", None),
        ("MESHRUN_MESH", None),
        ("PET_NNODES", None),
        ("MESHRUN_OPEN_STORE", None),
        ("MESHRUN_LISTENER", None),
        ("meshrun_mish", None),
    ],
)
def test_an_unknown_name_is_reported(name: str, hint: str | None) -> None:
    """Names with PET_ may be another program's, so only those like an option's are reported."""
    found = unknown({name: "1", "PATH": "/bin"})

    assert found == ([] if hint is None else [f"unknown environment variable {name}{hint}"])


def test_a_launch_inside_a_rank_reports_none() -> None:
    """The outer launch has reported the user's, and set the others."""
    env = {"MESHRUN_MISH": "2", "MESHRUN_RUN_ID": "x", "MESHRUN_GENERATION": "0"}
    assert unknown(env) == []


def test_variables_of_a_kubernetes_service_are_not_reported() -> None:
    """Each pod has those of all services, whatever their names."""
    ours = {"MESHRUN_UI_SERVICE_HOST", "MESHRUN_UI_SERVICE_PORT_HTTP", "MESHRUN_UI_PORT_80_TCP"}
    assert unknown(dict.fromkeys(ours, "1")) == []
    found = unknown(dict.fromkeys({*ours, "MESHRUN_MASTER_PORT"}, "1"))
    assert found == [
        "unknown environment variable MESHRUN_MASTER_PORT; did you mean PET_MASTER_PORT?"
    ]


def test_the_options_that_no_variable_sets_are_documented() -> None:
    """So users can look up which options cannot be set for all launches."""
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    named = page.partition("are read from the command line only:")[2].partition("`--dry-run`")[0]

    assert {*re.findall("`(--[a-z-]+)`", named)} == {
        row.flag for row in Options.rows() if row.variable is None
    }


def test_every_variable_of_the_code_is_known_or_documented() -> None:
    """It belongs to an option, to users, between launchers, or to ranks; code spells it once."""
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    documented = {*NAME.findall(page)}
    of_options = {str(row.variable) for row in Options.rows()}
    of_ranks = {
        name for name in vars(rank_variables).values() if isinstance(name, str) and name.isupper()
    }
    known = of_options | {*USER_VARIABLES} | BETWEEN_LAUNCHERS
    paths = [*Path(meshrun.__file__).parent.rglob("*.py")]
    used = {name for path in paths for name in NAME.findall(path.read_text())}

    assert used - known - documented == set()
    assert set(USER_VARIABLES) <= documented
    assert not BETWEEN_LAUNCHERS & documented - {"MESHRUN_LAUNCH_MARK"}
    set_in_ranks = page.partition("## Set for each rank")[2].partition("\n## ")[0]
    assert of_ranks <= {*re.findall("`([A-Z_]+)`", set_in_ranks)}
    without_option = {*rank_variables.OF_LAYOUT, "MESHRUN_RUN_ID", "MESHRUN_GENERATION"}
    assert {name for name in of_ranks if name.startswith("MESHRUN_")} - of_options == without_option
    texts = [path.read_text() for path in paths if path.parent.name != "cluster"]  # others' names
    for name in {*USER_VARIABLES, *BETWEEN_LAUNCHERS, *of_ranks} - {"RANK"}:  # a common word
        assert sum(text.count(f'"{name}"') for text in texts) == 1, name


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("MESHRUN_WARM_IDLE", "x", "--warm-idle expects a time, found `x` in MESHRUN_WARM_IDLE"),
        ("MESHRUN_REQUIRE", "x", "cannot parse --require `x` in MESHRUN_REQUIRE"),
        ("MESHRUN_STRAGGLER_TIME", "x", "found `x` in MESHRUN_STRAGGLER_TIME"),
        ("PET_MONITOR_INTERVAL", "x", "found `x` in PET_MONITOR_INTERVAL"),
        ("MESHRUN_OPEN_STORE", "perhaps", "MESHRUN_OPEN_STORE must be true or false"),
        ("MESHRUN_FULL_EXIT", "2", "MESHRUN_FULL_EXIT must be true or false, 1 or 0, found `2`"),
    ],
)
def test_a_bad_value_is_an_error_even_where_it_is_not_used(
    name: str, text: str, message: str
) -> None:
    """As on the command line."""
    with pytest.raises(UsageError, match=re.escape(message)):
        check_other_options(from_variables({name: text}))


@pytest.mark.parametrize(
    ("message", "behind"),
    [
        ("--names requires --mesh", " (MESHRUN_NAMES=a,b)"),
        ("--names-of x", ""),
        ("--names in MESHRUN_NAMES", ""),
        ("`zz` is not an index or range of a dim", " (MESHRUN_SHOW=zz)"),
        ("--nnodes expects a number, found `zz`", ""),
        ("no program given", ""),
    ],
)
def test_an_error_shows_the_variable_behind_an_option(message: str, behind: str) -> None:
    """It is found by the option that the error names, or else by the text that it quotes."""
    assert (
        from_variables({"MESHRUN_NAMES": "a,b", "MESHRUN_SHOW": "zz"}).variables_behind(message)
        == behind
    )
