"""The report on what listens, and where."""

from __future__ import annotations

import pytest

from meshrun.plan.plan import LaunchPlan
from meshrun.plan.rank_env import LaunchFacts
from meshrun.supervisor.listening import describe_listening
from tests.plans import plan_of


def plan(nnodes: str, device: str | None, **more: str) -> LaunchPlan:
    mesh = {} if device is None else {"mesh": "dp=-1", "device": device}
    return plan_of(nnodes=nnodes, nproc_per_node="2", **mesh, **more)


@pytest.mark.parametrize(
    ("nnodes", "device", "address", "env", "texts"),
    [
        ("1", "cpu", "127.0.0.1", {}, ["(loopback)", "on lo, so that gloo"]),
        ("1", "cuda", "::1", {}, ["(loopback)", "on lo, so that gloo", "on lo, so that nccl"]),
        ("1", None, "localhost", {}, ["(loopback)", "if the program uses", "if the program uses"]),
        ("1", "cpu", "10.0.0.1", {}, ["reachable by anyone who can reach this address", "on lo"]),
        ("1", "cpu", "0.0.0.0", {}, ["reachable by anyone who can reach this address", "on lo"]),
        ("1", "cpu", "::1", {"GLOO_SOCKET_IFNAME": "eth0"},
         ["(loopback)", "on eth0, so that gloo can connect them (GLOO_SOCKET_IFNAME is set)"]),
        ("2", "cpu", "10.0.0.1", {}, ["reachable by", "on eth1, so that gloo",
         "for 30 s", "at the endpoint"]),
        ("2", "cuda", "10.0.0.1", {"NCCL_SOCKET_IFNAME": "=ib0"},
         ["reachable by anyone", "on eth1", "on ib0, so that nccl", "for 30 s",
          "at the endpoint"]),
    ],
)  # fmt: skip
def test_each_listener_has_a_line(
    nnodes: str, device: str | None, address: str, env: dict[str, str], texts: list[str]
) -> None:
    """The store, the back ends for this device, and a last line that nothing else listens."""
    facts = LaunchFacts(
        run_id="r", master_addr=address, master_port=1,
        interface="lo" if nnodes == "1" else "eth1",
    )  # fmt: skip
    *lines, last = describe_listening(plan(nnodes, device), facts, env)

    assert len(lines) == len(texts)
    assert all(text in line for text, line in zip(texts, lines, strict=True))
    assert "nothing else" in last
