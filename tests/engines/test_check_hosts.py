"""``--check`` on several hosts, with one slow link and with one slow host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.hosts import MakeHosts
from tests.engines.together import Launch, launch_on
from tests.kit import PROGRAMS

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


def test_a_bad_node_is_left_out_before_the_program(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """One that differs from the others leaves; they are checked again, and run the program."""
    hosts = make_hosts(2)
    launches = [
        Launch(
            hosts, host,
            ["--check-first", "--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
             "node0:29400", "--mesh", "dp=1:2", "--nproc-per-node", "1", "--device", "cpu",
             "--node-history", tmp_path / "history", PROGRAMS / "describe.py"],
            around=["env", "OMP_NUM_THREADS=9",  # so that speeds are not compared
                    "prlimit", f"--nofile={1000 + host}:{1000 + host}"],
        )
        for host in (0, 1)
    ]  # fmt: skip
    assert [each.end() for each in launches] == [0, 78], [each.text for each in launches]
    why = "the hard limit of `ulimit -n` is 1001 on node1, and 1000 elsewhere"
    assert f"meshrun: found: {why}\n" in launches[0].text
    assert "generation 1 runs without node1: dp 2 -> 1" in launches[0].text
    assert "checked 1 rank on 1 node" in launches[0].text
    assert f"the check before the program excludes this node: {why}" in launches[1].text
    (line,) = (tmp_path / "history").read_text().splitlines()
    assert json.loads(line)["host"] == "node1"
    assert why in json.loads(line)["reason"]
