"""Lists of hosts, on the command line and in files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun.cli.options import Options
from meshrun.cli.read import build_request, with_hosts
from meshrun.errors import UsageError
from meshrun.plan.hostfile import Host, choose_hosts, is_host, parse_hostfile, parse_hosts
from meshrun.plan.rank_program import Program
from tests.plans import request_of

NAMES = st.from_regex(r"[a-z][a-z0-9]{0,6}(\.[a-z]{1,3})?", fullmatch=True)
HOSTS = st.lists(
    st.builds(Host, destination=NAMES, slots=st.none() | st.integers(1, 64)),
    min_size=1,
    unique_by=lambda host: host.name,
)


def _brief(host: Host) -> str:
    return host.destination + ("" if host.slots is None else f":{host.slots}")


@given(HOSTS)
def test_a_list_survives_formatting(hosts: list[Host]) -> None:
    """Whatever the names and slots."""
    assert list(parse_hosts(",".join(map(_brief, hosts)))) == hosts


@given(HOSTS)
def test_a_file_means_the_same_in_each_format(hosts: list[Host]) -> None:
    """DeepSpeed's with comments and blank lines, Open MPI's with max_slots and with a colon."""
    slots = [f"slots={host.slots}" if host.slots else "" for host in hosts]
    deepspeed = "# ours\n\n" + "\n".join(
        f"{host.destination} {word}  # {index}"
        for index, (host, word) in enumerate(zip(hosts, slots, strict=True))
    )
    most = "\n".join(
        f"{host.destination}\t{word} max_slots=64" for host, word in zip(hosts, slots, strict=True)
    )

    assert list(parse_hostfile(deepspeed, "f")) == hosts
    assert list(parse_hostfile(most, "f")) == hosts
    assert list(parse_hostfile("\n".join(map(_brief, hosts)), "f")) == hosts


@given(HOSTS, st.data())
def test_including_some_is_excluding_the_others(hosts: list[Host], data: st.DataObject) -> None:
    """And the rest keeps the order of the list."""
    kept = data.draw(st.sets(st.sampled_from(hosts), min_size=1))
    others = [host for host in hosts if host not in kept]
    included = choose_hosts(hosts, include="@".join(host.name for host in kept))
    excluded = choose_hosts(hosts, exclude="@".join(host.name for host in others) or None)

    assert included == excluded == tuple(host for host in hosts if host in kept)


@given(st.integers(1, 16), st.data())
def test_slots_are_included_or_excluded(count: int, data: st.DataObject) -> None:
    """Included and excluded slots together are all slots, each once, in order."""
    hosts = (Host("a", count), Host("b", 1))
    slots = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=count))
    text = "a:" + ",".join(map(str, slots))
    (taken,) = choose_hosts(hosts, include=text)
    left = choose_hosts(hosts, exclude=text)
    others = left[0].chosen if left[0].name == "a" else ()

    assert taken.chosen == tuple(sorted(slots))
    assert taken.workers == len(slots)
    assert sorted([*(taken.chosen or ()), *(others or ())]) == list(range(count))


@given(st.text())
def test_any_text_is_parsed_or_rejected(text: str) -> None:
    """With a UsageError; no name looks like an option of ssh."""
    for read in (parse_hosts, lambda text: parse_hostfile(text, "f")):
        try:
            hosts = read(text)
        except UsageError:
            continue
        assert hosts
        assert not any(host.destination.startswith("-") for host in hosts)


def test_a_file_of_many_hosts_is_read_quickly() -> None:
    """In hours, if each host were compared with all before it."""
    assert (
        len(parse_hostfile("\n".join(f"node{number}:8" for number in range(40_000)), "f")) == 40_000
    )


def test_an_address_or_a_user_is_part_of_the_destination() -> None:
    """ssh gets IPv6 addresses without brackets; a user is not part of the host's name."""
    hosts = parse_hosts("[fd00::1]:4, ada@[fe80::2%eth0] ,ada@c.example:2")

    assert [host.destination for host in hosts] == ["fd00::1", "ada@fe80::2%eth0", "ada@c.example"]
    assert [host.name for host in hosts] == ["fd00::1", "fe80::2%eth0", "c.example"]
    assert [host.slots for host in hosts] == [4, None, 2]
    assert all(is_host(host.name) for host in hosts)
    assert choose_hosts(hosts, include="[fd00::1]:1,3@c.example")[0].chosen == (1, 3)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "a\nb slots=two",
            "f, line 2: the number of slots must be a whole number of at least 1, found"
            " `slots=two`",
        ),
        ("a\n\n# b\nb slot=2", "f, line 4: cannot read `slot=2`"),
        ("a slots=4\na slots=2", "f, line 2: a is listed twice"),
        ("a slots=4 max_slots=2", "f, line 1: a has 4 slots, but max_slots is 2"),
        ("-oProxyCommand=x", "f, line 1: `-oProxyCommand=x` is not a host"),
        ("# nobody", "f lists no host"),
    ],
)
def test_a_file_that_cannot_be_parsed(text: str, error: str) -> None:
    """The error names the line."""
    with pytest.raises(UsageError) as caught:
        parse_hostfile(text, "f")

    assert caught.value.message == error


@pytest.mark.parametrize(
    ("choice", "error"),
    [
        ({"include": "c"}, "--include: unknown host `c`"),
        ({"include": "a:4"}, "--include: a has no slot 4"),
        ({"include": "a:x"}, "--include: slots of a must be numbers from 0, found `x`"),
        ({"include": "a:1@a:2"}, "--include: a is listed twice"),
        ({"exclude": "b:1"}, "--exclude names slots of b, whose number of slots is unknown"),
        ({"exclude": "a@b"}, "--exclude a@b leaves 0 of 2 hosts"),
        ({"include": "a", "exclude": "b"}, "--include cannot be used with --exclude"),
    ],
)
def test_an_impossible_choice_is_an_error(choice: dict[str, str], error: str) -> None:
    """The error names the option and the host."""
    with pytest.raises(UsageError) as caught:
        choose_hosts(parse_hosts("a:4,b"), **choice)

    assert caught.value.message == error


@pytest.mark.parametrize("typed", [[], ["hosts"], ["hostfile"], ["hosts", "hostfile"]])
def test_a_typed_list_overrides_a_variable(typed: list[str], tmp_path: Path) -> None:
    """Two typed lists, or two variables, exclude each other."""
    (file := tmp_path / "hosts").write_text("of-file slots=2\n")
    values = {"hosts": "named:2", "hostfile": str(file)}
    sources = {name: f"MESHRUN_{name.upper()}" for name in values}
    asked = Options(values, sources | dict.fromkeys(typed, "command line"), {})
    request = request_of()
    if len(typed) != 1:
        with pytest.raises(UsageError, match="--hosts cannot be used with --hostfile"):
            with_hosts(request, asked)
        return

    assert with_hosts(request, asked).hosts == ("named" if typed == ["hosts"] else "of-file",)


@pytest.mark.parametrize("name", ["hosts", "hostfile"])
def test_a_typed_standalone_overrides_a_list_in_a_variable(name: str) -> None:
    """It means this machine alone; together with a typed list it is an error."""
    values = {"standalone": True, name: "not-read"}
    of_standalone = {"standalone": "command line"}
    asked = Options(values, of_standalone | {name: f"MESHRUN_{name.upper()}"}, {})
    request = build_request(asked, Program(kind="script", target="train.py"))

    assert with_hosts(request, asked) is request
    with pytest.raises(UsageError):
        with_hosts(request, Options(values, of_standalone | {name: "command line"}, {}))
