"""What launchers tell each other: there and back, and what is no message."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun.nodes.messages import (
    Begin,
    End,
    Join,
    Message,
    MessageError,
    Over,
    Welcome,
    decode,
    encode,
)

TEXT = st.text(max_size=20)
PLAIN = st.none() | st.booleans() | st.integers() | TEXT
JSON = st.recursive(
    PLAIN | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
OF_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(),
    "int | None": st.none() | st.integers(),
    "float | None": st.none() | st.floats(allow_nan=False),
    "str": TEXT,
    "str | None": st.none() | TEXT,
    "bool": st.booleans(),
    "dict[str, str]": st.dictionaries(TEXT, TEXT, max_size=3),
    "dict[str, Any]": st.dictionaries(TEXT, JSON, max_size=3),
    "dict[str, list[str]]": st.dictionaries(TEXT, st.lists(TEXT, max_size=3), max_size=3),
    "list[str]": st.lists(TEXT, max_size=4),
    "list[int]": st.lists(st.integers(), max_size=4),
    "list[dict[str, Any]]": st.lists(st.dictionaries(TEXT, JSON, max_size=3), max_size=4),
}
KINDS = get_args(Message)


def any_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{each.name: OF_TYPE[str(each.type)] for each in fields(kind)})


@given(message=st.one_of([any_of(kind) for kind in KINDS]))
def test_what_is_encoded_is_decoded(message: Message) -> None:
    """Every kind, with any values of its types."""
    assert decode(encode(message)) == message


@given(
    text=st.binary(max_size=60)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.tuples(st.sampled_from([kind.__name__ for kind in KINDS]), JSON).map(
        lambda pair: json.dumps(pair).encode()
    )
)
def test_any_text_is_a_message_or_a_clear_error(text: bytes) -> None:
    """Nothing but MessageError comes of reading it."""
    try:
        message = decode(text)
    except MessageError as error:
        assert str(error).startswith("not a message: ")
    else:
        assert decode(encode(message)) == message


@given(message=st.one_of([any_of(kind) for kind in KINDS]), data=st.data())
def test_a_field_of_another_type_is_refused(message: Message, data: st.DataObject) -> None:
    """An order with a text where a number belongs is none."""
    kind, values = json.loads(encode(message))
    name = data.draw(st.sampled_from(sorted(values)))
    wrong = [1.5] if isinstance(values[name], dict | str | int | float) else {"a": [None]}
    if values[name] is None or isinstance(values[name], list):
        wrong = {"a": [None]}  # type: ignore[assignment]
    values[name] = wrong

    with pytest.raises(MessageError):
        decode(json.dumps([kind, values]).encode())


@pytest.mark.parametrize(
    "text",
    [
        b'["Join", {"host": "a", "node_rank": 0, "nproc": true, "settings": {}}]',
        b'["End", {"generation": 0, "why": "x"}]',
        b'["End", {"generation": 0, "why": "x", "signum": 0, "more": 1}]',
        b'["Nothing", {}]',
        b'[["End"], {}]',
        b"[" * 100_000,
        b'["Over", {"exit_code": ' + b"9" * 5000 + b"}]",
    ],
    ids=["a truth for a number", "a field short", "a field more", "no kind", "a list for a kind",
         "deep", "a long number"],
)  # fmt: skip
def test_what_is_no_message(text: bytes) -> None:
    """Told as such."""
    with pytest.raises(MessageError):
        decode(text)


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        (
            Welcome(node_rank=1, hosts=["a", "b"], nproc_per_node=[1, 1], run_id="r", store_port=1),
            {"hosts": ["a", 7]},
        ),
        (
            Welcome(node_rank=1, hosts=["a", "b"], nproc_per_node=[1, 1], run_id="r", store_port=1),
            {"nproc_per_node": [1, "1"]},
        ),
        (Join(host="a", node_rank=None, nproc=1, settings={"--mesh": "dp=2"}),
         {"settings": {"--mesh": 2}}),
    ],
    ids=["a number among hosts", "a text among counts", "a number for a setting"],
)  # fmt: skip
def test_what_is_in_lists_is_checked_too(message: Message, wrong: dict[str, Any]) -> None:
    """Nothing of another type travels inside a list or a table."""
    kind, values = json.loads(encode(message))

    with pytest.raises(MessageError):
        decode(json.dumps([kind, {**values, **wrong}]).encode())


def test_a_message_names_its_kind() -> None:
    """So that another version can tell what it does not know."""
    assert json.loads(encode(End(generation=1, why="w", signum=15)))[0] == "End"
    assert Begin in KINDS
    assert Over in KINDS
