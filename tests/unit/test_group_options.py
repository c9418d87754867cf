"""Back ends, timeouts and options of groups, as text and as values."""

from datetime import timedelta

import pytest

from meshrun.errors import UsageError
from meshrun.plan.group_options import GroupOptions, format_group_options, parse_group_options


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("15m", ("", 900.0)),
        ("90", ("", 90.0)),
        ("tp=1.5h", ("tp", 5400.0)),
        ("tp=250ms", ("tp", 0.25)),
        ("dp_cp=2d", ("dp_cp", 172800.0)),
    ],
)
def test_timeouts_have_units(text: str, expected: tuple[str, float]) -> None:
    """The default is seconds."""
    assert parse_group_options([], [text], []).timeouts_s == (expected,)


@pytest.mark.parametrize("text", ["tp=-1", "tp=0", "m", "tp=", "=3s", "1y"])
def test_an_invalid_timeout_is_an_error(text: str) -> None:
    """Zero and negative ones too."""
    with pytest.raises(UsageError, match="--timeout"):
        parse_group_options([], [text], [])


def test_an_option_is_for_one_dim_or_for_all() -> None:
    """One for a dim takes precedence."""
    options = parse_group_options(["gloo", "tp=nccl"], ["10s;tp=2m"], ["tp:a=1,b=2"])

    assert (options.backend("tp"), options.backend("dp")) == ("nccl", "gloo")
    assert options.timeout("tp") == timedelta(minutes=2)
    assert options.timeout("dp") == timedelta(seconds=10)
    assert options.settings == (("tp", "a", "1"), ("tp", "b", "2"))


def test_options_survive_their_variables() -> None:
    """Ranks read what was requested."""
    options = parse_group_options(
        ["cpu:gloo,cuda:nccl", "tp=nccl"], ["15m", "tp=90s"], ["tp:high=1"]
    )
    env = format_group_options(options)
    again = parse_group_options(
        [env["MESHRUN_BACKEND"]], [env["MESHRUN_TIMEOUT"]], [env["MESHRUN_PG_OPT"]]
    )

    assert again == options
    assert format_group_options(GroupOptions()) == {}


@pytest.mark.parametrize(
    ("backends", "settings"), [(["=nccl"], []), (["tp=n c"], []), ([], ["tp"]), ([], ["tp:a"])]
)
def test_what_cannot_be_parsed(backends: list[str], settings: list[str]) -> None:
    """The error's hint shows the syntax."""
    with pytest.raises(UsageError) as caught:
        parse_group_options(backends, [], settings)

    assert caught.value.hint


def test_an_unknown_dim_is_an_error() -> None:
    """The hint names the dims of the mesh."""
    with pytest.raises(UsageError, match="--timeout: the mesh has no dim `pp`") as caught:
        parse_group_options([], ["pp=3s"], []).check_dims(["dp", "tp"])

    assert caught.value.hint == "use a dim of the mesh: `dp`, `tp`"


@pytest.mark.parametrize(
    ("backend", "device", "message"),
    [
        ("goo", "cpu", "unknown backend `goo`"),
        ("tp=ncll", "cuda", "unknown backend `ncll`"),
        ("nccl", "cpu", "nccl requires cuda, but the mesh is on cpu"),
        ("tp=nccl", "xpu", "--backend tp=nccl: nccl requires cuda, but the mesh is on xpu"),
        ("cpu:nccl,cuda:nccl", "cpu", "nccl requires cuda, but the mesh is on cpu"),
        ("gloo", "cpu", None),
        ("cpu:gloo,cuda:nccl", "cpu", None),
        ("cpu:gloo,cuda:nccl", "cuda", None),
        ("hccl", "npu", None),
        ("occl", "openreg", None),
        ("my_own", "cpu", None),
    ],
)
def test_back_ends_fit_the_device(backend: str, device: str, message: str | None) -> None:
    """Checked before anything starts; a package's own back end is left to torch."""
    options = parse_group_options([backend], [], [])
    if message is None:
        options.check_backends(device)
        return
    with pytest.raises(UsageError, match=message) as caught:
        options.check_backends(device)

    assert caught.value.hint
