"""A launch to be started by a scheduler, as a value. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from meshrun.errors import UsageError
from meshrun.plan.plan import LaunchPlan
from meshrun.submit.patch import Patch
from meshrun.wording import count

CORES_A_GPU = 4
"""For a rank and its loader workers; every node that has GPUs has so many a GPU."""
CLEAR_UP_S = 30
"""What is left between the end of the ranks' grace and the scheduler's own SIGKILL."""
_LONGEST_NAME = 36
"""A name of DNS has 63 characters, and a pod's has a number, a kind and a random part as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a scheduler is to start on each node."""

    plan: LaunchPlan
    name: str
    options: tuple[tuple[str, ...], ...]
    """meshrun's options, each with its value."""
    program: tuple[str, ...]
    """The program and its arguments, ``-m`` before a module."""
    extras: tuple[str, ...]
    """What was said for the scheduler itself, as it was written."""
    accelerators: int
    """How many each node needs; 0 if ranks run on its cores."""
    image: str | None = None
    patches: tuple[Patch, ...] = ()
    """What the user changes in the manifests."""
    exported: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Variables of this environment that go along."""

    @property
    def nnodes(self) -> int:
        """How many nodes."""
        return self.plan.layout.nnodes

    @property
    def least(self) -> int | None:
        """How many nodes are enough; ``None`` if it takes all."""
        return self.plan.request.rendezvous.least_nodes

    @property
    def workers(self) -> int:
        """The most ranks that a node has."""
        return max(self.plan.layout.nproc_per_node)

    @property
    def cores(self) -> int:
        """Cores that each node needs at least."""
        return self.accelerators * CORES_A_GPU or self.workers

    @property
    def grace_s(self) -> int:
        """Seconds from SIGTERM until everything has exited."""
        return int(self.plan.request.shutdown_timeout_s) + CLEAR_UP_S

    @property
    def words(self) -> tuple[tuple[str, ...], ...]:
        """All words after ``meshrun``, those that belong together in one tuple."""
        return (*self.options, self.program)

    @property
    def summary(self) -> str:
        """The mesh, ranks and nodes, in one line."""
        layout = self.plan.layout
        mesh = f"mesh {layout.mesh}: " if layout.mesh is not None else ""
        nodes = count(self.nnodes, "node")
        if self.least is not None:
            nodes = f"{self.least} to {nodes}"
        counts = layout.nproc_per_node
        each = f"{counts[0]}" if len(set(counts)) == 1 else ",".join(map(str, counts))
        most = "up to " if self.least is not None else ""
        return f"{mesh}{most}{count(layout.world_size, 'rank')} on {nodes} x {each}"


def job_name(run_id: str | None, target: str, *, suffix: str = "") -> str:
    """Return a name that every scheduler takes: letters, digits and dashes, in lower case.

    Args:
        run_id: What the user calls the launch.
        target: The program, whose name is taken otherwise.
        suffix: What is added to that, where no two jobs may have the same name.

    Example:
        >>> job_name(None, "src/Train_LM.py", suffix="3f9a"), job_name("exp 7", "train.py")
        ('train-lm-3f9a', 'exp-7')
    """
    text = run_id or re.sub(r"\.py$", "", target.rstrip("/").rpartition("/")[2])
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    name = name if name[:1].isalpha() else f"job-{name}".rstrip("-")
    return f"{name}-{suffix}" if suffix and not run_id else name


def check_texts(*words: str) -> None:
    """Refuse bytes that are no text, which no script or manifest can hold.

    Raises:
        UsageError: With the word.
    """
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UsageError(f"--submit: {word!a} is not valid UTF-8") from None
