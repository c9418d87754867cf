"""current_layout(): the layout of this launch. No torch."""

from __future__ import annotations

from meshrun.errors import UsageError
from meshrun.layout import Layout
from meshrun.mesh.scheduler_task import launch_environment
from meshrun.plan.layout_env import not_a_launch, read_layout


def current_layout() -> Layout:
    """Return the place of every rank of this launch; needs no torch and no process group.

    It works in a rank, in any child of a rank, under torchrun, in a task of ``srun`` or ``mpirun``,
    and in a plain ``python``, which is a launch of one rank. ``generation`` counts the restarts;
    ``own_rank`` is the rank of this process, or of the rank that started it.

    Raises:
        MeshError: If the environment contradicts itself.
    """
    try:
        env = launch_environment()
    except UsageError as error:
        raise not_a_launch(error) from error
    return read_layout(env)
