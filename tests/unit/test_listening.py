"""The report on what listens, and where."""

from __future__ import annotations

import pytest

from meshrun.cli.options import Options
from meshrun.cli.read import build_request
from meshrun.host.machine import HostFacts
from meshrun.plan.plan import LaunchPlan, build_plan
from meshrun.plan.rank_env import LaunchFacts
from meshrun.plan.rank_program import Program
from meshrun.supervisor.listening import describe_listening


def plan(nnodes: str, device: str | None, **more: str) -> LaunchPlan:
    values = {"nnodes": nnodes, "nproc_per_node": "2", **more}
    if device is not None:
        values |= {"mesh": "dp=-1", "device": device}
    program = Program(kind="script", target="train.py")
    facts = HostFacts(hostname="h", usable_cores=4, accelerator=None, accelerator_count=0)
    return build_plan(build_request(Options(values, {}, {}), program), facts, check_host=False)


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
        run_id="r", master_addr=address, master_port=1, run_folder="/r",
        interface="lo" if nnodes == "1" else "eth1",
    )  # fmt: skip
    *lines, last = describe_listening(plan(nnodes, device), facts, env)

    assert len(lines) == len(texts)
    assert all(text in line for text, line in zip(texts, lines, strict=True))
    assert "nothing else" in last
