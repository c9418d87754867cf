"""The measured commands, as a user would type them apart from the interpreter's path."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

RANK_PROGRAM = str(Path(__file__).with_name("rank_program.py"))
SHAPES = {8: "2x4", 32: "4x8", 64: "8x8"}
"""The mesh for each number of ranks, dp by tp."""
_LEFT_BY_LAUNCHERS = ("MESHRUN_", "TORCHELASTIC_", "TORCHRUN_")
_LEFT_BY_TORCHRUN = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} | {
    f"{of}_{what}" for of in ("LOCAL", "GROUP", "ROLE") for what in ("RANK", "WORLD_SIZE")
}


@dataclass(frozen=True)
class Command:
    """A command line, its name in the tables, and what it adds to the environment."""

    name: str
    argv: tuple[str, ...]
    extra_environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of this process, without variables of a launcher above it."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in _LEFT_BY_TORCHRUN and not name.startswith(_LEFT_BY_LAUNCHERS)
        }
        return {**kept, **self.extra_environment}


def python(name: str, *arguments: str) -> Command:
    """Return a command for this interpreter, so that both launchers use the same torch."""
    return Command(name, (sys.executable, *arguments))


def meshrun(name: str, *arguments: str) -> Command:
    """Return ``meshrun ARGUMENTS``, independent of PATH."""
    return python(name, "-m", "meshrun", *arguments)


def torchrun(name: str, *arguments: str) -> Command:
    """Return ``torchrun ARGUMENTS``, independent of PATH."""
    return python(name, "-m", "torch.distributed.run", *arguments)


def meshrun_ranks(ranks: int, what: str, *arguments: str) -> Command:
    """Return a launch of :data:`RANK_PROGRAM` with meshrun."""
    shape = SHAPES[ranks]
    options = ("--mesh", shape, "--names", "dp,tp")
    return meshrun("meshrun", *options, RANK_PROGRAM, what, shape, *arguments)


def torchrun_ranks(ranks: int, what: str, *arguments: str, fork: bool = False) -> Command:
    """Return the same launch with torchrun; ``fork`` selects its mode that imports torch once."""
    options = ["--standalone", "--nproc-per-node", str(ranks)]
    if fork:
        options += ["--run-path", "--start-method", "fork"]
    name = "torchrun, fork" if fork else "torchrun"
    return torchrun(name, *options, RANK_PROGRAM, what, SHAPES[ranks], *arguments)


def accelerate_ranks(ranks: int, what: str) -> Command:
    """Return the same launch with ``accelerate launch``."""
    options = ("--multi_gpu", "--num_processes", str(ranks), "--mixed_precision", "no")
    options = (
        *options,
        "--num_machines",
        "1",
        "--dynamo_backend",
        "no",
        "--main_process_port",
        "0",
    )
    main = ("-m", "accelerate.commands.launch")
    return python("accelerate launch", *main, *options, RANK_PROGRAM, what, SHAPES[ranks])


def mpirun_ranks(ranks: int, what: str) -> Command:
    """Return the same launch with ``mpirun``, which sets the variables that torch needs."""
    set_up = (
        "export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE"
        ' MASTER_ADDR=127.0.0.1 MASTER_PORT=29617; exec "$@"'
    )
    options = ("-np", str(ranks), "--oversubscribe", "--allow-run-as-root", "--bind-to", "none")
    program = (sys.executable, RANK_PROGRAM, what, SHAPES[ranks])
    return Command("mpirun", ("mpirun", *options, "sh", "-c", set_up, "sh", *program))


def import_torch() -> Command:
    """Return the lower bound: one import of torch, which every launch needs.

    It includes Python's garbage collection and exit, so a launcher may still be faster.
    """
    return python("python, import torch", "-c", "import torch")
