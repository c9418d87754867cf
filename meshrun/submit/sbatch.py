"""A job as an sbatch script. Pure."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from meshrun.errors import PREEMPTED, RendezvousError, UsageError
from meshrun.host.own_variables import SECRET
from meshrun.submit.job import Job
from meshrun.submit.slurm_options import (
    check_options,
    container_options,
    end_options,
    names_container,
    options_in,
    split_containers,
)

_PRELUDE = f"""\
# The secret by which the nodes recognize each other, new for each run of the job.
export {SECRET}=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n')

"""
_ENDS_TOGETHER = """\
# Launchers exit together: wait 60 s for the others. --kill-on-bad-exit=1 would kill them at once
# and lose their exit codes. --export=ALL passes this environment, even if sbatch got another one.
"""
_ENDS_ALONE = """\
# Nodes that fail are left out, and the others continue without a time limit. --export=ALL passes
# this environment, even if sbatch got another one.
"""
_CORES_AGAIN = "# Since Slurm 22.05, srun does not inherit --cpus-per-task.\n"
_LOST = RendezvousError.exit_code
_REQUEUE = f"""\
code=$?

# {PREEMPTED}: preempted, and every rank exited with 0 after SIGTERM: requeue. {_LOST}: a node was \
lost, or the
# nodes did not find each other: requeue up to ten times. Any other code ends the job.
if [ "$code" -eq {PREEMPTED} ] || \
{{ [ "$code" -eq {_LOST} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt 10 ]; }}; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$code"
"""
_GPUS = ("--gres", "--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket")
_CORES = ("--cpus-per-task", "--cpus-per-gpu", "--cores-per-socket", "--exclusive")
_REPLACED_BY = {
    "--gpus-per-node": _GPUS,
    "--cpus-per-task": _CORES,
    "--requeue": ("--requeue", "--no-requeue"),
}
"""For some of our options, the user's options that replace it; others replace only themselves."""


def render_sbatch(job: Job, *, launcher: Sequence[str], folder: str) -> str:
    """Return the script of a job.

    ``launcher`` are the words that start meshrun, with absolute paths that are valid on the nodes.

    Raises:
        UsageError: If an option for sbatch contradicts the plan.
    """
    user_options = options_in(job.extras)
    check_options(job)
    if {"%", "\\"} & {*folder} and "--chdir" not in user_options:
        raise UsageError(
            f"--submit: `%` and `\\` have a special meaning in the folder of a Slurm job: {folder}",
            hint="submit from another folder, or pass --submit-arg=--chdir=PATH",
        )
    cores = "--cpus-per-task" in user_options or user_options.keys().isdisjoint(_CORES)
    is_elastic = job.min_nodes is not None
    nodes = '"$SLURM_JOB_NUM_NODES"' if is_elastic else job.nnodes
    srun = f"srun --nodes={nodes} --ntasks-per-node=1"
    if cores:
        srun += ' --cpus-per-task="$SLURM_CPUS_PER_TASK"'
    ends = " ".join(end_options(is_elastic=is_elastic))
    command = [f"{srun} \\\n    {ends} --export=ALL"]
    for word in map(_quote, container_options(job, folder)):
        if word.lstrip("'").startswith("-"):
            command.append(word)
        else:  # the value of the previous option
            command[-1] += f" {word}"
    if job.image is not None or names_container(job.extras):
        launcher = ["meshrun"]  # as installed in the image
    command.append(" ".join(map(_quote, launcher)))
    command += [shlex.join(words) for words in job.words]
    directives = "".join(f"{line}\n" for line in _directives(job, folder, user_options))
    requeues = "--no-requeue" not in user_options
    body = " \\\n    ".join(command)
    head = f"#!/bin/bash\n# {job.summary}\n\n{directives}\n{_PRELUDE}"
    head += _ENDS_ALONE if is_elastic else _ENDS_TOGETHER
    return f"{head}{_CORES_AGAIN if cores else ''}{body}\n{_REQUEUE if requeues else ''}"


def output_of(job_id: str, job: Job, folder: str) -> str:
    """Return the path of a job's output, with the common patterns expanded."""
    user_options = options_in(job.extras)
    pattern = user_options.get("--output", _output(user_options))
    for sign, value in (("%j", job_id), ("%A", job_id), ("%x", job.name)):
        pattern = pattern.replace(sign, value)
    return posixpath.join(folder, user_options.get("--chdir", ""), pattern)


def _output(user_options: Iterable[str]) -> str:
    return "%x-%A_%a.out" if "--array" in user_options else "%x-%j.out"


def _directives(job: Job, folder: str, user_options: Mapping[str, str]) -> Iterator[str]:
    groups: list[tuple[str, list[str]]] = [
        ("", [f"--job-name={job.name}", f"--chdir={_quote(folder)}"]),
        ("A requeued job appends to the same file.",
         [f"--output={_output(user_options)}", "--open-mode=append"]),
        *_nodes(job),
    ]  # fmt: skip
    if job.accelerators:
        groups[-1][1].append(f"--gpus-per-node={job.accelerators}")
    groups[-1][1].append(f"--cpus-per-task={job.cores}")
    groups += [
        (f"Ranks get {job.grace_s} s before the time limit to save and exit; Slurm may signal up"
        " to a minute earlier.", [f"--signal=TERM@{min(job.grace_s, 65535)}"]),
        ("Slurm may requeue the job if it is preempted or loses a node.", ["--requeue"]),
        ("From --submit-arg.", [rest for rest, _ in map(split_containers, job.extras) if rest]),
    ]  # fmt: skip
    for comment, options in groups:
        kept = [
            each
            for each in options
            if options is groups[-1][1]
            or user_options.keys().isdisjoint(
                _REPLACED_BY.get(name := each.partition("=")[0], (name,))
            )
        ]
        if comment and kept:
            yield f"# {comment}"
        yield from (f"#SBATCH {each}" for each in kept)


def _nodes(job: Job) -> Iterator[tuple[str, list[str]]]:
    comment = "One meshrun per node; it starts the ranks of that node."
    if job.min_nodes is None:
        yield comment, [f"--nodes={job.nnodes}", "--ntasks-per-node=1"]
    else:
        # With a number of tasks per node, Slurm would allocate the smallest number of nodes.
        yield "The job continues if a node fails.", ["--no-kill"]
        yield comment, [f"--nodes={job.min_nodes}-{job.nnodes}"]


def _quote(text: str) -> str:
    if "\n" in text:
        raise UsageError(f"--submit: a batch script cannot contain the path {text!r}")
    return shlex.quote(text)
