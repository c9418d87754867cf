"""Detects which system started this process; of several, the innermost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from meshrun.cluster.cluster_facts import ClusterFacts
from meshrun.cluster.kubernetes import (
    detect_indexed_job,
    detect_leader_worker_set,
    detect_pytorch_job,
    detect_trainer,
)
from meshrun.cluster.openmpi import detect_openmpi
from meshrun.cluster.skypilot import detect_skypilot
from meshrun.cluster.slurm import detect_shell, detect_step
from meshrun.errors import UsageError


class Surroundings(NamedTuple):
    """What a detector may look at."""

    env: Mapping[str, str]
    hostname: str
    terminal: bool | None


Detector = Callable[[Surroundings], ClusterFacts | None]

DETECTORS: tuple[Detector, ...] = (
    lambda here: detect_openmpi(here.env),
    lambda here: detect_skypilot(here.env),
    lambda here: detect_step(here.env, terminal=here.terminal),
    lambda here: detect_trainer(here.env),
    lambda here: detect_pytorch_job(here.env, here.hostname),
    lambda here: detect_leader_worker_set(here.env),
    lambda here: detect_indexed_job(here.env, here.hostname),
    lambda here: detect_shell(here.env, terminal=here.terminal),
)
"""Innermost first: mpirun starts its daemons by srun, SkyPilot runs on Kubernetes and Slurm,
Slurm's nodes may be pods, and every TrainJob and JobSet is made of Indexed Jobs."""


def detect_cluster(
    env: Mapping[str, str], *, hostname: str, terminal: bool | None = None
) -> ClusterFacts | None:
    """Return what the scheduler or launcher around this process says of it.

    Args:
        env: The environment.
        hostname: This machine's own name; pods carry their number in it.
        terminal: Whether this process has a controlling terminal, ``None`` if not known. It tells
            a shell of ``srun --pty`` from the tasks of a step that was started in it.

    Returns:
        The facts, or ``None`` where no system is recognised.

    Raises:
        UsageError: If a variable of the innermost system is broken.
    """
    found: ClusterFacts | None = None
    here = Surroundings(env, hostname, terminal)
    for detect in DETECTORS:
        outer = detect(here) if found is None else _or_none(detect, here)
        if found is None:
            found = outer
        elif outer is not None:
            note = f"{outer.system}: {outer.evidence}, around {found.system}"
            found = replace(found, notes=(*found.notes, note))
    return found


def _or_none(detect: Detector, here: Surroundings) -> ClusterFacts | None:
    """Return the facts of an outer system; errors of one that is not used do not matter."""
    try:
        return detect(here)
    except UsageError:
        return None
