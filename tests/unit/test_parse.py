"""Values of options, as they are written."""

from __future__ import annotations

import pytest

from meshrun.errors import UsageError
from meshrun.parse import parse_nnodes, parse_settings

PAIRS = (("join_timeout", "5"), ("timeout", "7"))


@pytest.mark.parametrize(
    "text",
    [
        "join_timeout=5,timeout=7",
        " join_timeout = 5 , timeout = 7,",
        "'join_timeout=5,timeout=7'",
        '"join_timeout=5,timeout=7"',
    ],
)
def test_settings_may_stand_in_quotes(text: str) -> None:
    """As in lists of arguments and manifests, where no shell takes them away."""
    assert parse_settings(text, "--rdzv-conf") == PAIRS


def test_a_quote_without_its_like_belongs_to_the_text() -> None:
    """It is no pair that somebody forgot to take away."""
    assert parse_settings("'timeout=5\"", "--rdzv-conf") == (("'timeout", '5"'),)


@pytest.mark.parametrize("text", ["'", "timeout", "=5"])
def test_settings_that_are_none(text: str) -> None:
    """Each has a key and a value."""
    with pytest.raises(UsageError, match="key=value"):
        parse_settings(text, "--rdzv-conf")


@pytest.mark.parametrize("text", ["0", "2:", ":2", "1:2:3", "two"])
def test_nodes_that_are_no_number(text: str) -> None:
    """What was written is shown whole."""
    with pytest.raises(UsageError, match=f"MIN:MAX, found `{text}`"):
        parse_nnodes(text)
