"""``--check`` on several hosts, with a slow link or a slow host.

``MESHRUN_REPEATS=20`` repeats each case 20 times, with each host and each link in turn.
"""

from __future__ import annotations

import json
import os
import re
from itertools import combinations
from pathlib import Path

import pytest

from tests.engines.hosts import Hosts, MakeHosts
from tests.engines.together import Launch, launch_on
from tests.kit import PROGRAMS

pytestmark = pytest.mark.torch
REPEATS = int(os.environ.get("MESHRUN_REPEATS", "1"))


@pytest.mark.nightly
@pytest.mark.parametrize("turn", range(REPEATS))
@pytest.mark.parametrize("what", ["link", "node", "nothing"])
def test_what_is_slow_is_named(make_hosts: MakeHosts, what: str, turn: int) -> None:
    """A slow link or a slow host, which is also left out of the host file; never a healthy one."""
    hosts = make_hosts(3 + turn % 2, name="n")
    pairs = list(combinations(range(len(hosts.names)), 2))
    one, other = pairs[turn // 2 % len(pairs)]
    if what != "nothing":
        hosts.slow(other, towards=one if what == "link" else None)

    text, named = check(hosts)
    if what == "node":
        assert len(named) == 1, text
        assert f"found: all links of n{other} are slow: " in named[0], text
        assert f"n{other} slots=1" not in text.partition("hosts that passed:")[2]
    elif what == "link":
        assert len(named) == 1, text
        assert f"found: the link between n{one} and n{other} is slow: " in named[0], text
    else:  # other programs may slow down one link by chance, but not the same one each time
        steadily = {re.split(" (?:is|are) slow: ", line)[0] for line in named}
        for _ in range(2 if steadily else 0):
            again = "\n".join(check(hosts)[1])
            steadily = {each for each in steadily if each in again}
        assert not steadily, text


def check(hosts: Hosts) -> tuple[str, list[str]]:
    """Measure a mesh over all hosts; return the output, and its lines on what is slow."""
    count = str(len(hosts.names))
    words = ("--check", "--mesh", f"dp={count}", "--nproc-per-node", "1", "--device", "cpu")
    meet = ("--nnodes", count, "--rdzv-endpoint", f"{hosts.addresses[0]}:29400")
    launches = launch_on(
        hosts, *words, "quick", each=lambda host: (*meet, "--node-rank", str(host))
    )
    assert {each.end() for each in launches} <= {0, 1}
    return launches[0].text, [line for line in launches[0].text.splitlines() if " slow: " in line]


@pytest.mark.nightly
def test_a_bad_node_is_left_out_before_the_program(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """The node that differs leaves; the others are checked again and run the program."""
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
