"""Options of sbatch and srun: what the user's say, and those of launchers. Pure."""

from __future__ import annotations

import posixpath
import shlex
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence

from meshrun.errors import UsageError
from meshrun.plan.parse import split_words
from meshrun.plan.request import LaunchRequest
from meshrun.submit.job import Job

_SHORT = {
    "-J": "--job-name", "-D": "--chdir", "-o": "--output", "-N": "--nodes", "-n": "--ntasks",
    "-c": "--cpus-per-task", "-G": "--gpus", "-a": "--array", "-k": "--no-kill",
}  # fmt: skip
_OF_THE_PLAN = (
    *("--nodes", "--ntasks", "--ntasks-per-node", "--tasks-per-node", "--ntasks-per-core"),
    *("--ntasks-per-socket", "--ntasks-per-gpu"),
)
_CONTAINER = ("--container", "--no-container")
"""What options of srun begin with that are about containers, those of pyxis too."""
_CONTAINER_SWITCHES = ("mount-home", "remap-root", "entrypoint", "writable", "readonly")
_HARMLESS = (signal.SIGCONT, signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH, signal.SIGQUIT)
"""Signals that end no meshrun; on SIGQUIT it shows where every rank is."""


def how_tasks_end(*, is_elastic: bool) -> list[str]:
    """Return the options of srun for launchers, which end together, or continue without others."""
    # To kill the others at once would take their exit codes.
    once_one_has = ["--no-kill", "--wait=0"] if is_elastic else ["--wait=60"]
    return ["--kill-on-bad-exit=0", *once_one_has]


def option_names(extras: Iterable[str]) -> set[str]:
    """Return the full names of the options in words for sbatch, such as ``-p gpu --time=4:00``."""
    return {name for name, _ in options_in(extras)}


def names_container(extras: Iterable[str]) -> bool:
    """Return whether words for sbatch name the image or bundle that meshrun is to run in."""
    return not option_names(extras).isdisjoint(("--container-image", "--container"))


def options_in(extras: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (full name, value) of each option, whatever stands after it if it takes none."""
    for text in extras:
        words = split_words(text, "--submit-arg")
        for word, following in zip(words, [*words, ""][1:], strict=True):
            name, equals, value = word.partition("=")
            if name.startswith("--"):
                yield name, value if equals else following
            elif name.startswith("-"):
                yield _SHORT.get(name[:2], name[:2]), word[2:] or following


def container_options(job: Job, folder: str) -> list[str]:
    """Return srun's options for a container, since the script itself runs outside of it.

    Without a folder of the user's choice, pyxis would start in one of the image's, where the
    program is not and where files are lost at the end.

    Raises:
        UsageError: If pyxis cannot mount the folder.
    """
    theirs = [word for _, words in map(split_containers, job.extras) for word in words]
    asked = dict(options_in(job.extras))
    if job.image is None and not names_container(job.extras):
        return theirs
    folder = posixpath.join(folder, asked.get("--chdir", "")).rstrip("/")
    if folder and not {"--container", "--container-workdir"} & asked.keys():
        theirs = [*_mount(theirs, folder), f"--container-workdir={folder}"]
    if job.image is not None and not names_container(job.extras):
        theirs.insert(0, f"--container-image={job.image}")
    return theirs


def _mount(words: Sequence[str], folder: str) -> list[str]:
    """Return srun's options with a folder among the mounts; of two options one would count."""
    if {",", ":"} & {*folder}:
        raise UsageError(
            f"--submit: pyxis cannot mount `{folder}`, whose name contains a comma or a colon",
            hint="submit from another folder, or pass --submit-arg=--container-workdir=PATH",
        )
    ahead = list(words)
    for at, word in enumerate(ahead):
        name, equals, value = word.partition("=")
        if name == "--container-mounts" and equals:
            return [*ahead[:at], f"{name}={folder},{value}", *ahead[at + 1 :]]
        if name == "--container-mounts" and at + 1 < len(ahead):
            return [*ahead[: at + 1], f"{folder},{ahead[at + 1]}", *ahead[at + 2 :]]
    return [f"--container-mounts={folder}", *ahead]


def split_containers(text: str) -> tuple[str, list[str]]:
    """Return what is for sbatch, as it was written if that is all, and the words for srun."""
    words, rest, found = split_words(text, "--submit-arg"), list[str](), list[str]()
    takes_value = False
    for word in words:
        if word.startswith(_CONTAINER):
            found.append(word)
            name, equals, _ = word.partition("=")
            takes_value = not equals and not name.endswith(_CONTAINER_SWITCHES)
        elif takes_value and not word.startswith("-"):
            found.append(word)
            takes_value = False
        else:
            rest.append(word)
            takes_value = False
    return (shlex.join(rest), found) if found else (text, [])


def check_options(job: Job) -> None:
    """Refuse options for sbatch that contradict the plan, or that it cannot read.

    Raises:
        UsageError: With the option.
    """
    extras = job.extras
    theirs = option_names(extras)
    if wrong := sorted(theirs.intersection(_OF_THE_PLAN)):
        raise UsageError(
            f"--submit-arg {wrong[0]} conflicts with the plan of {job.nnodes} nodes with one"
            " meshrun each",
            hint="use --nnodes and --nproc-per-node instead",
        )
    asked = dict(options_in(extras))
    if "--signal" in asked:
        _check_signal(asked["--signal"], job.plan.request)
    _check_gpus(asked, job)
    for text in extras:
        if "\n" in text or not text.startswith("-"):
            raise UsageError(
                f"--submit-arg expects an sbatch option, found `{text}`",
                hint="use --submit-arg=--partition=gpu, or --submit-arg '-p gpu -t 4:00:00'",
            )


def _check_gpus(asked: Mapping[str, str], job: Job) -> None:
    """Refuse fewer GPUs than there are workers to use them."""
    for name in ("--gres", "--gpus", "--gpus-per-node", "--gpus-per-task"):
        count = _count_gpus(asked.get(name, ""), of_all=name == "--gres")
        nodes = job.nnodes if name == "--gpus" else 1
        if count and count < job.accelerators * nodes:
            where = f"{job.nnodes} nodes" if nodes > 1 else "each node"
            raise UsageError(
                f"--submit-arg {name}={asked[name]}: {count} GPUs for"
                f" {job.accelerators * nodes} workers on {where}",
                hint=f"use --nproc-per-node {max(1, count // nodes)}, or --device cpu",
            )


def _count_gpus(text: str, *, of_all: bool) -> int:
    """Return how many GPUs ``gpu:a100:4`` or ``a100:4,h100:4`` are; 0 if that is unknown."""
    total = 0
    for each in text.split(","):
        words = each.split(":")
        kind, last = words[0], words[-1]
        if of_all and kind != "gpu":
            continue
        number = 1 if of_all and len(words) == 1 else int(last) if last.isdecimal() else 0
        if not number:
            return 0
        total += number
    return total


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
