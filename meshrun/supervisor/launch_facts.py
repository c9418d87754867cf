"""The facts about a launch that ranks need: at the start, and once the nodes have met."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace

from meshrun.host.interfaces import interface_of
from meshrun.host.sockets import LOOPBACK_INTERFACE
from meshrun.plan.plan import LaunchPlan, complete_plan
from meshrun.plan.rank_env import LaunchFacts
from meshrun.protocol.events import Met
from meshrun.supervisor.run_folder import RunFolder
from meshrun.supervisor.timers import timer_file


def facts_at_start(
    plan: LaunchPlan, run_id: str, folder: RunFolder, listener: socket.socket | None
) -> LaunchFacts:
    """Return the facts about a launch; on several nodes, those known before the nodes have met."""
    return LaunchFacts(
        run_id=run_id,
        master_addr=plan.store_address,
        master_port=listener.getsockname()[1] if listener is not None else 0,
        run_folder=folder.path,
        interface=LOOPBACK_INTERFACE,
        timer_file=timer_file(os.environ, folder.path),
    )


def complete(plan: LaunchPlan, facts: LaunchFacts, met: Met) -> tuple[LaunchPlan, LaunchFacts]:
    """Return plan and facts once the nodes have met."""
    plan = complete_plan(
        plan,
        node_rank=met.node_rank,
        nproc_per_node=met.nproc_per_node,
        nodes_per_domain=met.nodes_per_domain,
        roles=met.roles,
    )
    facts = replace(
        facts,
        run_id=met.run_id,
        master_addr=met.store_address,
        master_port=met.store_port,
        interface=interface_of(met.own_address),
        previous=json.dumps(met.previous) if met.previous else "",
    )
    return plan, facts
