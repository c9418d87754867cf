"""Plans of launches on an invented machine without accelerators."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from meshrun.cli.option import COMMAND_LINE
from meshrun.cli.options import Options
from meshrun.cli.read import build_request
from meshrun.host.machine import HostFacts
from meshrun.plan.plan import LaunchPlan, build_plan
from meshrun.plan.rank_program import Program
from meshrun.plan.rendezvous_config import RendezvousConfig, plan_rendezvous
from meshrun.plan.request import LaunchRequest, Rendezvous

TRAIN = Program(kind="script", target="train.py")
MACHINE = HostFacts(hostname="h", usable_cores=4, accelerator=None, accelerator_count=0)


def request_of(program: Program = TRAIN, **changes: Any) -> LaunchRequest:
    """Return the request of a command line without options, with these changes of its fields."""
    return replace(build_request(Options({}, {}, {}), program), **changes)


def meeting_of(**changes: Any) -> Rendezvous:
    """Return its rendezvous, with these changes."""
    return replace(request_of().rendezvous, **changes)


def config_of(nnodes: int = 2, **changes: Any) -> RendezvousConfig:
    """Return the configuration of the rendezvous of this many nodes, with these changes."""
    config = plan_rendezvous(meeting_of(), 2)
    assert config is not None
    return replace(config, nnodes=nnodes, **changes)


def plan_of(program: Program = TRAIN, **values: object) -> LaunchPlan:
    """Return the plan of a launch with these options, by name; it may be for other machines."""
    options = Options(values, dict.fromkeys(values, COMMAND_LINE), {})
    return build_plan(build_request(options, program), MACHINE, check_host=False)
