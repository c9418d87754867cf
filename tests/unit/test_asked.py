"""Texts of options, and where they came from -> a request."""

from __future__ import annotations

from typing import Any

import pytest

from meshrun.asked import Asked, build_request
from meshrun.errors import UsageError
from meshrun.request import LaunchRequest, Program

PROGRAM = Program(kind="script", target="x.py")


def request(*in_variables: str, **values: Any) -> LaunchRequest:
    sources = {
        name: f"PET_{name.upper()}" if name in in_variables else "command line" for name in values
    }
    return build_request(Asked(values, sources, {}), PROGRAM)


def test_times_of_a_rendezvous_are_whole_seconds() -> None:
    """torch reads them so; what is no time of its own stays as it was written."""
    asked = "join_timeout=5m,last_call_timeout=1.5s,read_timeout=90,store_type=file,wait=5m"

    assert dict(request(rdzv_conf=asked).rendezvous.conf) == {
        "join_timeout": "300", "last_call_timeout": "2", "read_timeout": "90",
        "store_type": "file", "wait": "5m",
    }  # fmt: skip
    with pytest.raises(UsageError, match=r"--rdzv-conf join_timeout is a time from 0 .* `soon`"):
        request(rdzv_conf="join_timeout=soon")


@pytest.mark.parametrize(
    ("nnodes", "in_variables"), [("1", ()), ("1:1", ()), ("1:4", ()), ("2", ("nnodes",))]
)
def test_standalone_is_one_node(nnodes: str, in_variables: tuple[str, ...]) -> None:
    """A variable of a job's does not speak against what was typed."""
    found = request(*in_variables, standalone=True, nnodes=nnodes)

    assert (found.nnodes, found.rendezvous.least_nodes) == (1, None)


@pytest.mark.parametrize("in_variables", [(), ("standalone",), ("standalone", "nnodes")])
def test_standalone_with_several_nodes_is_refused(in_variables: tuple[str, ...]) -> None:
    """torchrun waits in vain."""
    with pytest.raises(UsageError, match=r"--standalone.* means this node alone"):
        request(*in_variables, standalone=True, nnodes="2:4")
