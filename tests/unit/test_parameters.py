"""The error for a parameter of a wrong type: its name, what is accepted, what was found."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshrun
import meshrun.ray
from meshrun.errors import UsageError
from meshrun.layout.parameters import check_parameter
from meshrun.layout.spec import AnyMesh

_MESH = "a str, an int, a mapping of str to int or str or a list of int or str"
_SEVERAL = "a str or a list of str"


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("mesh", 3.5, _MESH), ("mesh", {"dp": 2.0}, _MESH), ("mesh", {1: 2}, _MESH),
        ("mesh", True, _MESH), ("mesh", b"dp=2", _MESH),
        ("nproc_per_node", [2], "an int or a str"), ("nproc_per_node", True, "an int or a str"),
        ("env", "x", "a mapping of str to str"), ("env", {"A": 1}, "a mapping of str to str"),
        ("names", [1, 2], _SEVERAL), ("preload", 3, _SEVERAL), ("device", 3, "a str"),
        ("cwd", 3, "a str or a path"),
        ("options", [3], "a str or a list of str or path"),
    ],
)  # fmt: skip
def test_an_error_for_a_wrong_type_names_the_parameter(
    name: str, value: Any, accepted: str
) -> None:
    """In each function that has it."""
    for function in (meshrun.launch, meshrun.ray.launch, lambda _, **it: meshrun.WorkerGroup(**it)):
        with pytest.raises(UsageError) as caught:
            function(print, **{name: value})
        assert caught.value.message == f"{name} must be {accepted}, found {value!r}"


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("warm", "no", "a bool"), ("shutdown_timeout", [5], "a number or a str"),
        ("prefix", 3, "a bool or a str"), ("max_restarts", 1.5, "an int"),
        ("kwargs", {1: 2}, "a mapping of str to object"), ("args", 3, "a list"),
        ("log_dir", 3, "a str or a path"),
    ],
)  # fmt: skip
def test_parameters_of_a_launch_alone(name: str, value: Any, accepted: str) -> None:
    with pytest.raises(UsageError) as caught:
        meshrun.launch(print, **{name: value})  # type: ignore[call-overload]
    assert caught.value.message == f"{name} must be {accepted}, found {value!r}"


def test_a_path_that_is_not_a_folder_is_an_error(tmp_path: Path) -> None:
    """Before anything starts."""
    (tmp_path / "file").touch()
    for function in (meshrun.launch, lambda _, **it: meshrun.WorkerGroup(**it)):
        for cwd in (tmp_path / "gone", str(tmp_path / "file")):
            with pytest.raises(UsageError, match=f"cwd must be a folder, found `{cwd}`"):
                function(print, cwd=cwd)


def test_parameters_of_a_layout() -> None:
    layout = meshrun.Layout.parse("dp=2,tp=4")
    for name, value, accepted in (
        ("nnodes", "2", "an int"),
        ("nproc_per_node", "8", "an int or a list of int"),
        ("nproc_per_node", [2, "x"], "an int or a list of int"),
    ):
        wanted: Any = {name: value}
        with pytest.raises(UsageError) as caught:
            meshrun.Layout.parse("dp=2", **wanted)
        assert caught.value.message == f"{name} must be {accepted}, found {value!r}"
    with pytest.raises(UsageError, match="other must be a Layout or a list of int, found 'dp=4'"):
        layout.map_to("dp=4", 0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="an index for each dim, found 3"):
        layout.rank(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.int64(2), AnyMesh), ((np.int32(2), 4), AnyMesh), (UserDict(dp=2), AnyMesh),
        ({"dp": "2:8"}, AnyMesh), ({"dp": 2}.keys(), AnyMesh), (np.float32(5), float | None),
        (5, float), (None, float | None), (Path("/"), str | Path), (object(), Any), (True, Any),
    ],
)  # fmt: skip
def test_compatible_values_are_accepted(value: object, kind: Any) -> None:
    """NumPy numbers, and mappings and collections of any kind."""
    check_parameter("value", value, kind)
