"""Plans of launches on an invented machine without accelerators."""

from __future__ import annotations

from meshrun.cli.option import COMMAND_LINE
from meshrun.cli.options import Options
from meshrun.cli.read import build_request
from meshrun.host.machine import HostFacts
from meshrun.plan.plan import LaunchPlan, build_plan
from meshrun.plan.rank_program import Program

TRAIN = Program(kind="script", target="train.py")
MACHINE = HostFacts(hostname="h", usable_cores=4, accelerator=None, accelerator_count=0)


def plan_of(program: Program = TRAIN, **values: object) -> LaunchPlan:
    """Return the plan of a launch with these options, by name; it may be for other machines."""
    options = Options(values, dict.fromkeys(values, COMMAND_LINE), {})
    return build_plan(build_request(options, program), MACHINE, check_host=False)
