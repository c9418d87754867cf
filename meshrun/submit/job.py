"""A launch that a scheduler is to start, as a value. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshrun.errors import UsageError
from meshrun.plan.plan import LaunchPlan

CORES_A_GPU = 4
"""For a rank and its loader workers; every node that has GPUs has so many a GPU."""
CLEAR_UP_S = 30
"""What is left between the end of the ranks' grace and the scheduler's own SIGKILL."""
_OF_THE_SUBMISSION = (
    *("submit", "submit_arg", "image", "module"),
    *("include", "exclude", "export", "ssh", "connect_timeout"),  # without hosts of no effect
)
_OF_NO_JOB = {
    **dict.fromkeys(
        ("node_rank", "rdzv_endpoint", "rdzv_backend", "master_addr", "local_addr", "standalone"),
        "nodes of a job find each other",
    ),
    **dict.fromkeys(("hosts", "hostfile"), "the scheduler chooses a job's hosts"),
    "debug_rank": "a job has no terminal",
}
"""Options that make no sense for a job, and why."""
_WORDS_FOR_THE_MACHINE = ("auto", "gpu", "cpu", "xpu")


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

    @property
    def nnodes(self) -> int:
        """How many nodes."""
        return self.plan.layout.nnodes

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
        """Seconds from SIGTERM until all is gone by itself."""
        return int(self.plan.request.shutdown_timeout_s) + CLEAR_UP_S

    @property
    def words(self) -> tuple[tuple[str, ...], ...]:
        """All words after ``meshrun``, those that belong together in one tuple."""
        return (*self.options, self.program)

    @property
    def summary(self) -> str:
        """What runs, in one line for people."""
        layout = self.plan.layout
        mesh = f"mesh {layout.mesh}: " if layout.mesh is not None else ""
        nodes = f"{self.nnodes} node{'s' if self.nnodes > 1 else ''}"
        counts = layout.nproc_per_node
        each = f"{counts[0]}" if len(set(counts)) == 1 else ",".join(map(str, counts))
        return f"{mesh}{layout.world_size} ranks on {nodes} x {each}"


def check_options(values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Refuse what can be known of one node alone, or once the job runs.

    Raises:
        UsageError: With the option, and the variable that it came from.
    """
    for name, why in _OF_NO_JOB.items():
        if name not in sources or (name == "rdzv_backend" and values[name] == "static"):
            continue
        option, source = f"--{name.replace('_', '-')}", sources[name]
        is_variable = source.isupper()
        asked = f"{option} (from {source})" if is_variable else option
        raise UsageError(
            f"--submit with {asked}: {why}",
            hint=f"unset {source}" if is_variable else f"leave {option} out",
        )
    for name in ("rank", "color_dim", "format"):
        if values.get(name) not in (None, "text"):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"--submit with {option}: a dry run of a job is the text that is handed in",
                hint=f"leave --submit out to see the plan, or {option}",
            )
    if values.get("nproc_per_node") in _WORDS_FOR_THE_MACHINE:
        raise UsageError(
            f"--submit with --nproc-per-node {values['nproc_per_node']}: the nodes' devices and"
            " cores are not known here",
            hint="a number: --nproc-per-node 8",
        )
    if ":" in str(values.get("nnodes") or ""):
        raise UsageError(
            f"--submit with --nnodes {values['nnodes']}: a job has one number of nodes",
            hint=f"--nnodes {str(values['nnodes']).rpartition(':')[2]}",
        )


def words_again(
    values: Mapping[str, Any], sources: Mapping[str, str]
) -> tuple[tuple[str, ...], ...]:
    """Return the options that were given, by whatever way, as words of a command line.

    Example:
        >>> words_again({"mesh": "-1", "tee": "3"}, {"mesh": "MESHRUN_MESH", "tee": ""})
        (('--mesh=-1',),)
    """
    words: list[tuple[str, ...]] = []
    for name, value in values.items():
        if not sources.get(name) or name in _OF_THE_SUBMISSION:
            continue
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, list | tuple):
            words += [_pair(option, str(each)) for each in value]
        elif value is True:
            words.append((option,))
        elif value is not False and value is not None:
            words.append(_pair(option, str(value)))
    return tuple(words)


def _pair(option: str, value: str) -> tuple[str, ...]:
    return (f"{option}={value}",) if value.startswith("-") else (option, value)


def job_name(run_id: str | None, target: str) -> str:
    """Return a name that every scheduler takes: letters, digits and dashes, in lower case.

    Example:
        >>> job_name(None, "src/Train_LM.py"), job_name("exp 7", "train.py")
        ('train-lm', 'exp-7')
    """
    text = run_id or re.sub(r"\.py$", "", target.rstrip("/").rpartition("/")[2])
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
    return name if name[:1].isalpha() else f"job-{name}".rstrip("-")


def check_texts(*words: str) -> None:
    """Refuse bytes that are no text, which no script or manifest can hold.

    Raises:
        UsageError: With the word.
    """
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UsageError(f"--submit: {word!a} is no text in UTF-8") from None
