"""A job for a scheduler, as a value. Pure."""

from __future__ import annotations

import re

from msgspec import Struct
from msgspec.structs import replace

from meshrun.errors import UsageError
from meshrun.plan.plan import LaunchPlan
from meshrun.submit.documents import Patch
from meshrun.wording import count

CORES_PER_GPU = 4
"""For a rank and its loader workers; every node with GPUs has at least so many cores per GPU."""
CLEANUP_S = 30
"""The time between the end of the ranks' grace period and the scheduler's own SIGKILL."""
_LONGEST_NAME = 36
"""A DNS name has at most 63 characters; a pod's also has an index, a kind and a random part."""


class Job(Struct, frozen=True, kw_only=True):
    """A launch that a scheduler starts on each of its nodes."""

    plan: LaunchPlan
    name: str
    options: tuple[tuple[str, ...], ...]
    """meshrun's options, each with its value."""
    program: tuple[str, ...]
    """The program and its arguments, with ``-m`` before a module."""
    extras: tuple[str, ...]
    """The user's options for the scheduler itself, unchanged."""
    accelerators: int
    """The number that each node needs; 0 if ranks run on CPUs."""
    image: str | None = None
    patches: tuple[Patch, ...] = ()
    """The user's changes of the manifests."""
    exported: tuple[tuple[str, str], ...] = ()
    """Variables of this environment that the job gets."""

    def __repr__(self) -> str:
        return Struct.__repr__(replace(self, exported=()))  # may be secret

    @property
    def nnodes(self) -> int:
        """The number of nodes; the largest one if nodes may join and leave."""
        return self.plan.layout.nnodes

    @property
    def min_nodes(self) -> int | None:
        """The smallest number of nodes; ``None`` if the job needs all."""
        return self.plan.request.rendezvous.least_nodes

    @property
    def workers(self) -> int:
        """The largest number of ranks on a node."""
        return max(self.plan.layout.nproc_per_node)

    @property
    def cores(self) -> int:
        """The number of cores that each node needs."""
        return self.accelerators * CORES_PER_GPU or self.workers

    @property
    def grace_s(self) -> int:
        """Seconds from SIGTERM until everything has exited."""
        return int(self.plan.request.shutdown_timeout_s) + CLEANUP_S

    @property
    def words(self) -> tuple[tuple[str, ...], ...]:
        """All words after ``meshrun``, in tuples of words that belong together."""
        return (*self.options, self.program)

    @property
    def summary(self) -> str:
        """The mesh, ranks and nodes in one line."""
        layout = self.plan.layout
        mesh = f"mesh {layout.mesh}: " if layout.mesh is not None else ""
        nodes = count(self.nnodes, "node")
        if self.min_nodes is not None:
            nodes = f"{self.min_nodes} to {nodes}"
        counts = layout.nproc_per_node
        each = f"{counts[0]}" if len(set(counts)) == 1 else ",".join(map(str, counts))
        most = "up to " if self.min_nodes is not None else ""
        return f"{mesh}{most}{count(layout.world_size, 'rank')} on {nodes} x {each}"


def job_name(run_id: str | None, target: str, *, suffix: str = "") -> str:
    """Return a name that every scheduler accepts: lower-case letters, digits and dashes.

    Args:
        run_id: The user's name for the launch, if there is one.
        target: The program, whose name is used otherwise.
        suffix: Added to the program's name, where no two jobs may have the same name.

    Example:
        >>> job_name(None, "src/Train_LM.py", suffix="3f9a"), job_name("exp 7", "train.py")
        ('train-lm-3f9a', 'exp-7')
    """
    text = run_id or re.sub(r"\.py$", "", target.rstrip("/").rpartition("/")[2])
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    name = name if name[:1].isalpha() else f"job-{name}".rstrip("-")
    return f"{name}-{suffix}" if suffix and not run_id else name


def check_texts(*words: str) -> None:
    """Check that words are valid text, since scripts and manifests cannot contain other bytes.

    Raises:
        UsageError: If one is not.
    """
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UsageError(f"--submit: {word!a} is not valid UTF-8") from None
