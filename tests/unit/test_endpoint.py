"""Whether an endpoint is this machine."""

from __future__ import annotations

import pytest

from meshrun.host.host_names import is_address
from meshrun.rendezvous.endpoint import Endpoint, classify_endpoint, is_same_name

OWN = {"127.0.0.1", "::1", "127.0.1.1", "10.0.0.1", "fe80::1"}


def seen(host: str, *addresses: str) -> Endpoint:
    """Classify an endpoint on a machine named here.cluster."""
    return classify_endpoint(host, addresses, own_addresses=OWN, own_name="here.cluster")


@pytest.mark.parametrize(
    ("endpoint", "is_ours", "facing"),
    [
        (seen("here", "10.0.0.1"), True, ("10.0.0.1",)),
        (seen("here", "127.0.1.1"), True, ()),  # from Debian's hosts file: no one else reaches it
        (seen("here", "127.0.1.1", "10.0.0.1"), True, ("10.0.0.1",)),
        (seen("here.cluster"), True, ()),
        (seen("Here", "127.0.1.1"), True, ()),
        (seen("here", "10.0.0.2"), True, ()),  # as on a host that others reach by another address
        (seen("here.lan", "127.0.1.1"), True, ()),
        (seen("here.lan", "10.0.0.2"), False, ()),  # a namesake in another domain
        (seen("there", "10.0.0.2"), False, ()),
        (seen("there"), False, ()),
        (seen("alias", "10.0.0.1"), True, ("10.0.0.1",)),
        (seen("10.0.0.1", "10.0.0.1"), True, ("10.0.0.1",)),
        (seen("127.0.0.1", "127.0.0.1"), True, ("127.0.0.1",)),  # explicitly requested
        (seen("localhost", "127.0.0.1", "::1"), True, ("127.0.0.1", "::1")),
        (seen("fe80::1%eth0", "fe80::1%eth0"), True, ("fe80::1%eth0",)),
    ],
    ids=lambda value: value.host if isinstance(value, Endpoint) else "",
)
def test_an_endpoint_is_ours_or_not(
    endpoint: Endpoint, is_ours: bool, facing: tuple[str, ...]
) -> None:
    """By its addresses or its name; loopback faces others only if explicitly requested."""
    assert endpoint.is_ours is is_ours
    assert endpoint.facing == facing


@pytest.mark.parametrize(
    ("host", "addresses", "is_ambiguous"),
    [
        ("here", ["127.0.1.1"], True),  # the other nodes may know it by another interface's address
        ("here", ["10.0.0.1"], False),
        ("here", ["10.0.0.1", "fd00::1"], False),
        ("here", ["10.0.0.1", "172.17.0.1", "fd00::1"], True),  # as nss-myhostname answers
        ("there", ["10.0.0.2"], False),
    ],
)
def test_one_of_several_interfaces_is_not_guessed(
    host: str, addresses: list[str], is_ambiguous: bool
) -> None:
    """A machine often has another interface for containers, with an address of its own."""
    own = {*OWN, "172.17.0.1", "fd00::1"}
    endpoint = classify_endpoint(host, addresses, own_addresses=own, own_name="here.cluster")

    assert endpoint.is_ambiguous is is_ambiguous


@pytest.mark.parametrize(
    ("host", "other", "same"),
    [("a", "a.b", True), ("a.c", "a.b", True), ("a", "ab", False), ("a.b", "c.b", False),
     ("Node0", "node0.lan", True), ("10.0.0.1", "10.0.0.2", False), ("fd00::1", "fd00::2", False)],
)  # fmt: skip
def test_names_with_and_without_a_domain(host: str, other: str, same: bool) -> None:
    """The first part decides, in upper or lower case; an address has only one."""
    assert is_same_name(host, other) is same


def test_addresses_are_distinguished_from_names() -> None:
    """Including those with an interface."""
    found = {each: is_address(each) for each in ("10.0.0.1", "fe80::1%eth0", "::1", "n1", "10.0.0")}

    assert [each for each, yes in found.items() if yes] == ["10.0.0.1", "fe80::1%eth0", "::1"]
