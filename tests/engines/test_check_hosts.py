"""``--check`` on several hosts, with one slow link and with one slow host."""

from __future__ import annotations

import pytest

from tests.engines.hosts import MakeHosts
from tests.engines.together import launch_on

pytestmark = pytest.mark.torch


@pytest.mark.nightly
@pytest.mark.parametrize("what", ["link", "node"])
def test_what_is_slow_is_named(make_hosts: MakeHosts, what: str) -> None:
    """A link between two hosts, or all links of one: that host is left out of the host file."""
    hosts = make_hosts(3, name="n")
    slow = "limit rate over 8 mbytes/second burst 64 kbytes"
    hosts.drop(2, slow if what == "node" else f"ip saddr {hosts.addresses[1]} {slow}")
    words = ("--check", "--mesh", "dp=3", "--nproc-per-node", "1", "--device", "cpu", "quick")
    launches = launch_on(
        hosts,
        *words,
        each=lambda host: (
            "--nnodes",
            "3",
            "--node-rank",
            str(host),
            "--rdzv-endpoint",
            f"{hosts.addresses[0]}:29400",
        ),
    )

    assert {each.end() for each in launches} <= {0, 1}
    told = launches[0].text
    if what == "node":
        assert "found: all links of n2 are slow: " in told, told
        assert "n2 slots=1" not in told.partition("hosts that passed:")[2]
    else:
        assert "found: the link between n1 and n2 is slow: " in told, told
