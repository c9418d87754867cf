"""A job as an sbatch script, and checks of its options. Pure."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterable, Iterator, Sequence

from meshrun.errors import UsageError
from meshrun.plan.request import LaunchRequest
from meshrun.submit.job import Job

_PRELUDE = """\
# The secret by which the nodes recognize each other, new for each run of the job.
export MESHRUN_SECRET=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n')

# Launchers exit together: wait 60 s for the others. --kill-on-bad-exit=1 would kill them at once
# and lose their exit codes. --export=ALL passes this environment, whatever sbatch was given.
"""
_CORES_AGAIN = "# Since Slurm 22.05, srun does not inherit --cpus-per-task.\n"
_REQUEUE = """\
code=$?

# 75: preempted, and every rank exited with 0 after SIGTERM: requeue. 69: a node was lost, or the
# nodes did not find each other: requeue up to ten times.
if [ "$code" -eq 75 ] || { [ "$code" -eq 69 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ]; }; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$code"
"""
_SHORT = {
    "-J": "--job-name", "-D": "--chdir", "-o": "--output", "-N": "--nodes", "-n": "--ntasks",
    "-c": "--cpus-per-task", "-G": "--gpus",
}  # fmt: skip
_OF_THE_PLAN = ("--nodes", "--ntasks", "--ntasks-per-node")
_GPUS = ("--gres", "--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket")
_CORES = ("--cpus-per-task", "--cpus-per-gpu", "--cores-per-socket", "--exclusive")
_HARMLESS = (signal.SIGCONT, signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH, signal.SIGQUIT)
"""Signals that end no meshrun; on SIGQUIT it shows where every rank is."""
_SAME_CHOICE = {
    "--gpus-per-node": _GPUS,
    "--cpus-per-task": _CORES,
    "--requeue": ("--requeue", "--no-requeue"),
}
"""Options of sbatch, and those of the user that take their place; by default the same alone."""


def render_sbatch(job: Job, *, launcher: Sequence[str], folder: str) -> str:
    """Return the script.

    Args:
        job: What it is to start.
        launcher: The words that start meshrun, by absolute paths that the nodes know too.
        folder: The working directory.

    Raises:
        UsageError: If an option for sbatch contradicts the plan.
    """
    theirs = option_names(job.extras)
    _check(theirs, job.extras, job)
    cores = "--cpus-per-task" in theirs or not theirs & set(_CORES)
    srun = f"srun --nodes={job.nnodes} --ntasks-per-node=1"
    if cores:
        srun += ' --cpus-per-task="$SLURM_CPUS_PER_TASK"'
    command = [
        f"{srun} \\\n    --kill-on-bad-exit=0 --wait=60 --export=ALL",
        " ".join(map(_quote, launcher)),
    ]
    command += [shlex.join(words) for words in job.words]
    directives = "".join(f"{line}\n" for line in _directives(job, folder, theirs))
    requeues = not theirs & {"--no-requeue"}
    body = " \\\n    ".join(command)
    head = f"#!/bin/bash\n# {job.summary}\n\n{directives}\n{_PRELUDE}"
    return f"{head}{_CORES_AGAIN if cores else ''}{body}\n{_REQUEUE if requeues else ''}"


def option_names(extras: Iterable[str]) -> set[str]:
    """Return the full names of the options in words for sbatch, such as ``-p gpu --time=4:00``."""
    return {name for name, _ in _options(extras)}


def output_of(job_id: str, job: Job, folder: str) -> str:
    """Return where the output of a job goes, if its pattern can be resolved here."""
    pattern = dict(_options(job.extras)).get("--output", "%x-%j.out")
    for sign, value in (("%x", job.name), ("%j", job_id), ("%A", job_id)):
        pattern = pattern.replace(sign, value)
    return pattern if pattern.startswith("/") else f"{folder.rstrip('/')}/{pattern}"


def _options(extras: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (full name, value) of each option, whatever stands after it if it takes none."""
    for text in extras:
        words = _split(text)
        for word, following in zip(words, [*words[1:], ""], strict=True):
            name, equals, value = word.partition("=")
            if name.startswith("--"):
                yield name, value if equals else following
            elif name.startswith("-"):
                yield _SHORT.get(name[:2], name[:2]), word[2:] or following


def _directives(job: Job, folder: str, theirs: set[str]) -> Iterator[str]:
    groups: list[tuple[str, list[str]]] = [
        ("", [f"--job-name={job.name}", f"--chdir={_quote(folder)}"]),
        ("A requeued job appends to the same file.",
         ["--output=%x-%j.out", "--open-mode=append"]),
        ("One meshrun per node; it starts the ranks of that node.",
         [f"--nodes={job.nnodes}", "--ntasks-per-node=1"]),
    ]  # fmt: skip
    if job.accelerators:
        groups[-1][1].append(f"--gpus-per-node={job.accelerators}")
    groups[-1][1].append(f"--cpus-per-task={job.cores}")
    groups += [
        (f"Ranks get {job.grace_s} s before the time limit to save and exit; Slurm may signal up"
        " to a minute earlier.", [f"--signal=TERM@{min(job.grace_s, 65535)}"]),
        ("Slurm may requeue the job if it is preempted or loses a node.", ["--requeue"]),
        ("From --submit-arg.", list(job.extras)),
    ]  # fmt: skip
    for why, options in groups:
        kept = [
            each
            for each in options
            if options is groups[-1][1] or not _is_taken(each.partition("=")[0], theirs)
        ]
        if why and kept:
            yield f"# {why}"
        yield from (f"#SBATCH {each}" for each in kept)


def _is_taken(name: str, theirs: set[str]) -> bool:
    return bool(theirs.intersection(_SAME_CHOICE.get(name, (name,))))


def _check(theirs: set[str], extras: Iterable[str], job: Job) -> None:
    if wrong := sorted(theirs.intersection(_OF_THE_PLAN)):
        raise UsageError(
            f"--submit-arg {wrong[0]} conflicts with the plan of {job.nnodes} nodes with one"
            " meshrun each",
            hint="use --nnodes and --nproc-per-node instead",
        )
    if asked := dict(_options(extras)).get("--signal"):
        _check_signal(asked, job.plan.request)
    for text in extras:
        if "\n" in text or not text.startswith("-"):
            raise UsageError(
                f"--submit-arg expects an sbatch option, found `{text}`",
                hint="use --submit-arg=--partition=gpu, or --submit-arg '-p gpu -t 4:00:00'",
            )


def _check_signal(asked: str, request: LaunchRequest) -> None:
    """Refuse a signal that would end the job before its ranks could take note."""
    flags, _, rest = asked.rpartition(":")
    if "B" in flags:
        raise UsageError(
            f"--submit-arg --signal={asked}: `B` signals only the batch shell, which would end"
            " the job",
            hint=f"use --signal={rest}, which reaches every meshrun, and through it the ranks",
        )
    name = rest.partition("@")[0].removeprefix("SIG")
    known = {each.name.removeprefix("SIG"): each for each in signal.Signals}
    known |= {str(int(each)): each for each in signal.Signals}
    signum = known.get(name)
    if signum is not None and signum not in (
        *_HARMLESS, *request.stop_signals, *request.forwarded_signals,
    ):  # fmt: skip
        raise UsageError(
            f"--submit-arg --signal={asked}: {signum.name} would end meshrun",
            hint=f"add --forward {signum.name.removeprefix('SIG')} to pass it to the ranks instead",
        )


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--submit-arg cannot read `{text}`: {error}") from None


def _quote(text: str) -> str:
    if "\n" in text:
        raise UsageError(f"--submit: a batch script cannot contain the path {text!r}")
    return shlex.quote(text)
