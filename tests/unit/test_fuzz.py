"""Absurd input gives success or a clear error, never another exception or a hang."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from inspect import signature
from itertools import product
from typing import Any, get_args
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from meshrun.cli.command import run_line
from meshrun.cli.options import Options
from meshrun.errors import MeshrunError
from meshrun.layout import Layout
from meshrun.layout.derived import parse_flatten, parse_view
from meshrun.layout.selection import select_ranks
from meshrun.layout.spec import parse_mesh
from meshrun.mesh.current import layout_of
from meshrun.mesh.current_layout import current_layout, data_shard
from meshrun.plan.group_options import format_group_options, parse_group_options, read_group_options
from meshrun.protocol import codec
from meshrun.protocol.caller import Invocation

NUMBERS = (
    *("", "0", "1", "2", "3", "4", "8", "-1", "-7", "007", "1e3", "0x2", "1_0", " 2 ", "+4", "2.5"),
    *("nan", "inf", "\u00b2", "\u0664", "999983", "999999937", "1000000000", "9" * 30, "9" * 5000),
)
"""Texts in the place of a number: small ones, odd spellings, primes, and far too large ones."""
WORDS = (
    *("dp", "tp", "cp", "ep_2", "pp", "rank", "local_rank", "auto", "gpu", "static", "SIGTERM"),
    *("true", "no", "gloo", "nccl", "loss", "host", "[::1]", "0-3", "15m", "\u00e9", "dp_cp"),
)
SIGNS = ("=", ",", ":", "x", "+", ";", "-", " ", ".", "=-1", "=2,", "=2", "x2", "/", "${", "\n")

numbers = st.sampled_from(NUMBERS)
texts = st.one_of(
    numbers,
    st.lists(st.sampled_from(NUMBERS + WORDS + SIGNS), max_size=8).map("".join),
    st.lists(st.tuples(st.sampled_from(WORDS), numbers), min_size=1, max_size=45).map(
        lambda pairs: ",".join(f"{name}={size}" for name, size in pairs)
    ),
    st.lists(numbers, min_size=1, max_size=45).map("x".join),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20),
)

LAUNCH = (
    *("MESHRUN_MESH", "MESHRUN_FLATTEN", "MESHRUN_VIEW", "MESHRUN_DATA_DIMS", "MESHRUN_DEVICE"),
    *("MESHRUN_NPROC_PER_NODE", "MESHRUN_GENERATION", "MESHRUN_BACKEND", "MESHRUN_TIMEOUT"),
    *("MESHRUN_PG_OPT", "TORCHELASTIC_RESTART_COUNT", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    *("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
)
OPTIONS = sorted(
    row.variable
    for row in Options.rows()
    # Left out: options that write a file, or print the plan of millions of ranks.
    if row.variable and row.variable not in ("MESHRUN_OUTPUT", "MESHRUN_ALL")
)


def is_answered(ask: Callable[[], object]) -> bool:
    """Return whether ``ask`` succeeds; it may raise only a MeshrunError with a message."""
    try:
        ask()
    except MeshrunError as error:
        assert error.message
        assert str(error)
        return False
    return True


@given(texts, st.none() | texts)
def test_any_text_is_a_mesh_or_an_error(text: str, names: str | None) -> None:
    """And every mesh can be parsed from its own text."""
    if is_answered(lambda: parse_mesh(text, names)):
        mesh = parse_mesh(text, names)

        assert parse_mesh(str(mesh)) == mesh


@given(texts)
def test_any_text_is_a_derived_dim_or_an_error(text: str) -> None:
    """And every value can be parsed from its own text."""
    for parse in (parse_flatten, parse_view):
        if is_answered(lambda parse=parse: parse(text)):
            assert parse(str(parse(text))) == parse(text)


counts = numbers.filter(lambda text: text.isdecimal() and len(text) < 40).map(int)
specs = st.none() | texts
several = st.lists(texts, max_size=2)


@given(specs, st.tuples(counts, st.none() | counts), several, several, texts)
@example("999999937x1", (4, None), [], [], "")
@example("2", (10**9, None), [], [], "")
@example("x".join(["999999999"] * 45), (3, None), [], [], "")
def test_any_layout_fits_or_is_an_error(
    spec: str | None,
    machines: tuple[int, int | None],
    flatten: list[str],
    views: list[str],
    where: str,
) -> None:
    """However large its numbers, with any flattened dims, views and selection of ranks."""
    nodes, workers = machines

    def ask() -> None:
        layout = Layout.parse(
            spec, nnodes=nodes, nproc_per_node=workers, flatten=flatten, views=views
        )
        if layout.world_size < 10_000:
            select_ranks(layout, where)
            assert Layout.from_dict(layout.to_dict()) == layout

    is_answered(ask)


plain_values = st.recursive(
    st.none() | st.integers(-2, 4) | st.just(10**12) | st.sampled_from(["dp=2", "dp", "4", ""]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.just("dp"), inner),
    max_leaves=3,
)


@given(st.dictionaries(st.sampled_from([*Layout.parse("dp=2").to_dict(), "more"]), plain_values))
def test_any_values_are_a_layout_or_an_error(values: dict[str, Any]) -> None:
    """Whatever a file contains."""

    def ask() -> None:
        layout = Layout.from_dict(values)
        assert Layout.from_dict(layout.to_dict()) == layout

    is_answered(ask)


durations = st.builds(
    "{}{}".format,
    st.integers(0, 10**7) | st.floats(0, 1e6, allow_nan=False) | numbers,
    st.sampled_from(["", "ms", "s", "m", "h", "d", "y"]),
)


@given(texts | durations, texts, texts)
@example("15d", "", "")
@example("0.0001ms", "", "")
def test_any_group_options_reach_the_ranks(timeout: str, backend: str, setting: str) -> None:
    """Ranks read from their environment what the command line said."""
    for texts_of in (([timeout], [], []), ([], [backend], []), ([], [], [setting])):
        timeouts, backends, pairs = texts_of
        read = partial(parse_group_options, backends, timeouts, pairs)
        if is_answered(read):
            with mock.patch.dict(os.environ, format_group_options(read())):
                assert read_group_options(os.environ) == read()


@given(st.dictionaries(st.sampled_from(LAUNCH), texts, max_size=6))
@example({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "0"})
@example({"WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "9" * 30, "MESHRUN_NPROC_PER_NODE": "1"})
def test_any_environment_is_a_launch_or_an_error(values: dict[str, str]) -> None:
    """Whatever RANK, WORLD_SIZE and the like contain."""
    with mock.patch.dict(os.environ, values):
        is_answered(current_layout)
        is_answered(lambda: layout_of("dp=-1", None))
        is_answered(lambda: read_group_options(os.environ))
        is_answered(data_shard)


@settings(suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(st.sampled_from(OPTIONS), texts, max_size=5),
    st.sampled_from([[], ["--mesh", "dp=2,tp=4"], ["--mesh", "2x-1"], ["--nnodes", "2"]]),
)
@example({"PET_LOCAL_RANKS_FILTER": "\u00b2"}, [])
@example({"PET_LOCAL_RANKS_FILTER": "0-" + "9" * 12}, [])
@example({"PET_TEE": "9" * 5000 + ":1"}, [])
@example({"MESHRUN_GPUS": "9" * 5000}, [])
@example({"MESHRUN_GPU_MEMORY_WAIT": "9" * 400 + "MiB"}, [])
@example({"PET_NNODES": "9" * 4000, "PET_NPROC_PER_NODE": "9" * 4000}, [])
def test_any_options_are_a_plan_or_an_error(values: dict[str, str], words: list[str]) -> None:
    """Options come from their variables, which are read like the command line."""
    is_planned(values, words)


@pytest.mark.nightly
@pytest.mark.parametrize("text", ["{}", "0-{}", "{}-{}", "{}.{}", "{}:{}", "{}MiB", "{}s", "{}x{}"])
def test_a_number_of_any_length_is_a_plan_or_an_error(text: str) -> None:
    """Python converts at most 4,300 digits, and 400 are too many for a float."""
    for digits, option in product((400, 5000), OPTIONS):
        is_planned({option: text.replace("{}", "9" * digits)}, [])


def is_planned(values: dict[str, str], words: list[str]) -> None:
    """Plan a launch with these variables and words; check that it succeeds or gives an error."""

    def ask() -> None:
        run_line(["--dry-run", *words, "train.py"], Invocation(0))

    with mock.patch.dict(os.environ, values), open(os.devnull, "w") as null, redirect_stdout(null):
        is_answered(ask)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def packets(draw: st.DrawFn) -> bytes:
    """Packets that are almost messages: often of a known kind, with wrong fields."""
    kinds = {kind.__name__: kind for kind in get_args(codec.Message)}
    kind = draw(st.sampled_from(sorted(kinds)) | st.text(max_size=8))
    fields = signature(kinds[kind]).parameters if kind in kinds else ("rank",)
    values = {name: draw(json_values) for name in fields if draw(st.integers(0, 9))}
    packet = json.dumps(draw(st.sampled_from([[kind, values], [kind], {kind: values}, values])))
    cut = draw(st.integers(0, len(packet)))
    return packet.encode()[: cut or None]


@given(packets())
def test_any_packet_is_a_message_or_an_error(packet: bytes) -> None:
    """And every message survives another packet, except NaN, which equals nothing."""
    try:
        message = codec.decode(packet)
    except codec.WireError:
        return
    if b"NaN" not in packet:
        assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize("depth", [1_000, 100_000])
def test_a_deep_packet_is_an_error(depth: int) -> None:
    """Nesting does not exhaust the stack."""
    for opening in (b"[", b'{"a":', b'["Exit", {"grace_s": ['):
        with pytest.raises(codec.WireError):
            codec.decode(opening * depth)
