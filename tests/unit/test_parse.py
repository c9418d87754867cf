"""Parsers of option values."""

from __future__ import annotations

import signal

import pytest

from meshrun.errors import UsageError
from meshrun.plan.parse import (
    parse_endpoint,
    parse_gpu_memory_wait,
    parse_nnodes,
    parse_seconds,
    parse_settings,
    parse_signals,
    unknown_signal,
)

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
    """As in argument lists and manifests, where no shell removes them."""
    assert parse_settings(text, "--rdzv-conf") == PAIRS


def test_an_unmatched_quote_belongs_to_the_text() -> None:
    """Only a matching pair is removed."""
    assert parse_settings("'timeout=5\"", "--rdzv-conf") == (("'timeout", '5"'),)


@pytest.mark.parametrize("text", ["'", "timeout", "=5", "timeout=", "timeout=5,is_host= "])
def test_invalid_settings(text: str) -> None:
    """Each needs a key and a value."""
    with pytest.raises(UsageError, match="key=value"):
        parse_settings(text, "--rdzv-conf")


@pytest.mark.parametrize("text", [":29500", " :0", "[]:1", "node 1:29500", "node1 :29500"])
def test_an_endpoint_names_a_host(text: str) -> None:
    """If a variable was empty, each node would otherwise take itself for the first one."""
    with pytest.raises(UsageError, match="no valid host"):
        parse_endpoint(text)


@pytest.mark.parametrize("text", ["0", "2:", ":2", "1:2:3", "two"])
def test_invalid_numbers_of_nodes(text: str) -> None:
    """The error quotes the whole text."""
    with pytest.raises(UsageError, match=f"MIN:MAX, found `{text}`"):
        parse_nnodes(text, "--nnodes")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30.0), ("0", 0.0), (" 5 ", 5.0), (".5", 0.5), ("1e3", 1000.0), ("30s", 30.0),
        ("250ms", 0.25), ("5m", 300.0), ("1.5h", 5400.0), ("1h30m", 5400.0), ("2d", 172800.0),
    ],
)  # fmt: skip
def test_times_have_units(text: str, seconds: float) -> None:
    """Without a unit, a number is in seconds."""
    assert parse_seconds(text, "--node-timeout") == seconds


@pytest.mark.parametrize("text", ["", "-1", "-5m", "m", "5 m", "5y", "1h30", "nan", "inf", "200d",
                                  pytest.param("9" * 100_000 + "x", id="long")])  # fmt: skip
def test_invalid_times(text: str) -> None:
    """The error quotes the text, and the hint shows a valid time."""
    with pytest.raises(UsageError, match=f"found `{text}`") as caught:
        parse_seconds(text, "--node-timeout")

    assert "`5m`" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "limit", "timeout_s"),
    [
        ("512MiB,50s", 512 << 20, 50.0),
        ("1.5GiB,2m", 3 << 29, 120.0),
        ("2GB", 2_000_000_000, 50.0),
        ("700 m,0", 700 << 20, 0.0),
    ],
)
def test_waits_for_memory(text: str, limit: int, timeout_s: float) -> None:
    found = parse_gpu_memory_wait(text, "--gpu-memory-wait")

    assert (found.limit_bytes, found.timeout_s) == (limit, timeout_s)


@pytest.mark.parametrize("text", ["", "50s", "512", "-1GiB", "512MiB,", "512MiB,soon", "x,1"])
def test_invalid_waits_for_memory(text: str) -> None:
    with pytest.raises(UsageError, match="--gpu-memory-wait") as caught:
        parse_gpu_memory_wait(text, "--gpu-memory-wait")
    assert caught.value.hint


def test_unknown_signals_are_listed_apart() -> None:
    """torchrun warns about them and handles the others."""
    known, unknown = parse_signals("SIGTERM,usr1,SIGFOO,TERMM,15,,SIGTERM", "--signals-to-handle")

    assert (known, unknown) == ((signal.SIGTERM, signal.SIGUSR1), ("SIGFOO", "TERMM", "15"))
    assert [unknown_signal(name) for name in unknown] == [
        "unknown signal `SIGFOO`",
        "unknown signal `TERMM` (did you mean `SIGTERM`?)",
        "unknown signal `15`",
    ]
