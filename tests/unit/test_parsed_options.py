"""How parsed options, and where each came from, become a request."""

from __future__ import annotations

from typing import Any

import pytest

from meshrun.cli.option import COMMAND_LINE
from meshrun.cli.options import Options
from meshrun.cli.read import build_request
from meshrun.errors import UsageError
from meshrun.host.rank_variables import GENERATION
from meshrun.plan.choices import TEMPLATE_FIELDS
from meshrun.plan.rank_program import Program
from meshrun.plan.request import LaunchRequest

PROGRAM = Program(kind="script", target="x.py")


def request(*in_variables: str, **values: Any) -> LaunchRequest:
    sources = {
        name: f"PET_{name.upper()}" if name in in_variables else "command line" for name in values
    }
    return build_request(Options(values, sources, {}), PROGRAM)


def test_times_of_a_rendezvous_are_whole_seconds() -> None:
    """As torch expects them; other settings stay as they were written."""
    asked = "join_timeout=5m,last_call_timeout=1.5s,read_timeout=90,store_type=file,wait=5m"

    assert dict(request(rdzv_conf=asked).rendezvous.conf) == {
        "join_timeout": "300", "last_call_timeout": "2", "read_timeout": "90",
        "store_type": "file", "wait": "5m",
    }  # fmt: skip
    with pytest.raises(UsageError, match=r"--rdzv-conf join_timeout expects a time, found `soon`"):
        request(rdzv_conf="join_timeout=soon")


@pytest.mark.parametrize(("backend", "node_rank"), [("static", 5), ("c10d", None), ("etcd", None)])
def test_a_node_rank_is_for_static_rendezvous(backend: str, node_rank: int | None) -> None:
    """torchrun ignores it elsewhere, even if it is larger than the number of nodes."""
    found = request(nnodes="2", node_rank="5", rdzv_backend=backend)

    assert found.rendezvous.node_rank == node_rank


def test_an_empty_log_folder_means_no_logs() -> None:
    """As in torchrun: ``--log-dir "$LOGS"`` writes no files if the variable is not set."""
    assert request(log_dir="").logs.log_dir is None


@pytest.mark.parametrize(
    ("nnodes", "in_variables"), [("1", ()), ("1:1", ()), ("1:4", ()), ("2", ("nnodes",))]
)
def test_standalone_is_one_node(nnodes: str, in_variables: tuple[str, ...]) -> None:
    """What was typed overrides a variable of the job."""
    found = request(*in_variables, standalone=True, nnodes=nnodes)

    assert (found.nnodes, found.rendezvous.least_nodes) == (1, None)


@pytest.mark.parametrize("in_variables", [(), ("standalone",), ("standalone", "nnodes")])
def test_standalone_with_several_nodes_is_refused(in_variables: tuple[str, ...]) -> None:
    """torchrun would wait until its timeout."""
    with pytest.raises(UsageError, match=r"--standalone.* runs on this node alone"):
        request(*in_variables, standalone=True, nnodes="2:4")


def test_a_launch_inside_a_rank_is_not_warm() -> None:
    """A server would end with the rank, so none is started, and a note says so."""
    values, sources = {"warm": True}, {"warm": COMMAND_LINE}
    outside = build_request(Options(values, sources, {}), PROGRAM)
    inside = build_request(Options(values, sources, {GENERATION: "0"}), PROGRAM)

    assert (outside.warm_idle_s, outside.notes) == (600, ())
    assert inside.warm_idle_s is None
    assert [note.partition(":")[0] for note in inside.notes] == [
        "--warm has no effect inside a rank"
    ]


@pytest.mark.parametrize("device", ["cdua", "cpuu", "gpux"])
def test_a_misspelt_device_type_is_an_error_without_a_mesh_too(device: str) -> None:
    """A name unlike all known ones may come from a package."""
    if device == "gpux":
        assert request(device=device).device == "gpux"
        return
    with pytest.raises(UsageError, match=f"unknown device type `{device}`"):
        request(device=device)


def test_a_template_may_only_have_known_fields() -> None:
    """A typo is an error in an option, and only noted in torchrun's variable."""
    template = "$$5 $5 " + " ".join(f"${{{name}}} ${name}" for name in TEMPLATE_FIELDS)
    assert request(log_line_prefix_template=template).console.template == template
    for slip in ("${rnk}", "$rnk"):
        with pytest.raises(UsageError, match=r"unknown field `\$\{?rnk") as caught:
            request(log_line_prefix_template=slip)
        assert caught.value.hint == "did you mean `${rank}`?"

    found = build_request(Options({}, {}, {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "$x"}), PROGRAM)
    assert found.console.template == "$x"
    assert found.notes == ("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE: unknown field `$x`",)


@pytest.mark.parametrize(
    ("typed", "template"),
    [
        ({}, "X "),
        ({"no_prefix": True}, None),
        ({"prefix": "none"}, None),
        ({"prefix": "mesh"}, None),
        ({"prefix": "torchrun"}, "X "),  # for --tee
    ],
)
@pytest.mark.parametrize("variable", ["PET", "TORCHELASTIC"])
def test_a_typed_prefix_overrides_a_template_in_a_variable(
    variable: str, typed: dict[str, Any], template: str | None
) -> None:
    """With --no-prefix, lines have none."""
    if variable == "PET":
        found = request("log_line_prefix_template", log_line_prefix_template="X ", **typed)
    else:
        env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "X "}
        found = build_request(Options(typed, dict.fromkeys(typed, COMMAND_LINE), env), PROGRAM)

    assert found.console.template == template


@pytest.mark.parametrize(
    ("in_variables", "values", "expected"),
    [
        ((), {}, "mesh"),
        ((), {"no_prefix": True}, "none"),
        ((), {"prefix": "torchrun"}, "torchrun"),
        (("no_prefix",), {"no_prefix": True, "prefix": "torchrun"}, "torchrun"),
        (("prefix",), {"no_prefix": True, "prefix": "torchrun"}, "none"),
    ],
)
def test_which_prefix_lines_get(
    in_variables: tuple[str, ...], values: dict[str, Any], expected: str
) -> None:
    """If two options differ, the typed one counts."""
    assert request(*in_variables, **values).console.prefix == expected
