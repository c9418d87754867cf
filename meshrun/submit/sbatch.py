"""A job as an sbatch script, with the user's options of sbatch and srun. Pure."""

from __future__ import annotations

import posixpath
import shlex
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence

from meshrun.errors import PREEMPTED, RendezvousError, UsageError
from meshrun.host.own_variables import SECRET
from meshrun.plan.parse import split_words
from meshrun.plan.request import LaunchRequest
from meshrun.submit.job import Job
from meshrun.wording import count

_SHORT = {
    "-J": "--job-name", "-D": "--chdir", "-o": "--output", "-N": "--nodes", "-n": "--ntasks",
    "-c": "--cpus-per-task", "-G": "--gpus", "-a": "--array", "-k": "--no-kill",
}  # fmt: skip
_SET_BY_PLAN = (
    "--nodes", "--ntasks", "--ntasks-per-node", "--tasks-per-node", "--ntasks-per-core",
    "--ntasks-per-socket", "--ntasks-per-gpu",
)  # fmt: skip
_CONTAINER = ("--container", "--no-container")
"""Prefixes of srun's options about containers, including those of pyxis."""
_CONTAINER_SWITCHES = ("mount-home", "remap-root", "entrypoint", "writable", "readonly")
_HARMLESS = (signal.SIGCONT, signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH, signal.SIGQUIT)
"""Signals that do not end meshrun; on SIGQUIT it shows where every rank is."""
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
    ]  # fmt: skip
    launcher = "One meshrun per node; it starts the ranks of that node."
    if job.min_nodes is None:
        groups.append((launcher, [f"--nodes={job.nnodes}", "--ntasks-per-node=1"]))
    else:
        # With a number of tasks per node, Slurm would allocate the smallest number of nodes.
        groups.append(("The job continues if a node fails.", ["--no-kill"]))
        groups.append((launcher, [f"--nodes={job.min_nodes}-{job.nnodes}"]))
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


def _quote(text: str) -> str:
    if "\n" in text:
        raise UsageError(f"--submit: a batch script cannot contain the path {text!r}")
    return shlex.quote(text)


def end_options(*, is_elastic: bool) -> list[str]:
    """Return the options of srun for launchers that end together, or continue without others."""
    after_first_end = ["--no-kill", "--wait=0"] if is_elastic else ["--wait=60"]
    return ["--kill-on-bad-exit=0", *after_first_end]  # 1 would lose the other exit codes


def names_container(extras: Iterable[str]) -> bool:
    """Return whether words for sbatch name the image or bundle in which meshrun is to run."""
    return not options_in(extras).keys().isdisjoint(("--container-image", "--container"))


def options_in(extras: Iterable[str]) -> dict[str, str]:
    """Return the full names and values of options for sbatch, such as ``-p gpu --time=4:00``.

    The value is the next word if there is no ``=``.
    """
    found: dict[str, str] = {}
    for text in extras:
        words = split_words(text, "--submit-arg")
        for word, following in zip(words, [*words, ""][1:], strict=True):
            name, equals, value = word.partition("=")
            if name.startswith("--"):
                found[name] = value if equals else following
            elif name.startswith("-"):
                found[_SHORT.get(name[:2], name[:2])] = word[2:] or following
    return found


def container_options(job: Job, folder: str) -> list[str]:
    """Return srun's options for a container; the script itself runs outside of it.

    pyxis gets the folder to mount and start in. It would start in a folder of the image, which
    lacks the program and loses files at the end.

    Raises:
        UsageError: If pyxis cannot mount the folder.
    """
    words = [word for _, words in map(split_containers, job.extras) for word in words]
    user_options = options_in(job.extras)
    if job.image is None and not names_container(job.extras):
        return words
    folder = posixpath.join(folder, user_options.get("--chdir", "")).rstrip("/")
    if folder and not {"--container", "--container-workdir"} & user_options.keys():
        words = [*_mount(words, folder), f"--container-workdir={folder}"]
    if job.image is not None and not names_container(job.extras):
        words.insert(0, f"--container-image={job.image}")
    return words


def _mount(words: Sequence[str], folder: str) -> list[str]:
    """Return srun's options with a folder added to the mounts, as pyxis reads only one option."""
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
    """Split the user's options into those for sbatch and, about containers, those for srun.

    Without any for srun, the text is returned unchanged.
    """
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
    """Check that the user's options for sbatch are valid and do not contradict the plan.

    Raises:
        UsageError: If one is not.
    """
    user_options = options_in(job.extras)
    if wrong := sorted(user_options.keys() & {*_SET_BY_PLAN}):
        raise UsageError(
            f"--submit-arg {wrong[0]} conflicts with the plan of {count(job.nnodes, 'node')} with"
            " one meshrun each",
            hint="use --nnodes and --nproc-per-node instead",
        )
    if "--signal" in user_options:
        _check_signal(user_options["--signal"], job.plan.request)
    _check_gpus(user_options, job)
    for text in job.extras:
        if "\n" in text or not text.startswith("-"):
            raise UsageError(
                f"--submit-arg expects an sbatch option, found `{text}`",
                hint="use --submit-arg=--partition=gpu, or --submit-arg '-p gpu -t 4:00:00'",
            )


def _check_gpus(user_options: Mapping[str, str], job: Job) -> None:
    """Refuse fewer GPUs than there are workers."""
    for name in ("--gres", "--gpus", "--gpus-per-node", "--gpus-per-task"):
        gpus = _count_gpus(user_options.get(name, ""), is_gres=name == "--gres")
        nodes = job.nnodes if name == "--gpus" else 1
        if gpus and gpus < job.accelerators * nodes:
            where = f"{job.nnodes} nodes" if nodes > 1 else "each node"
            raise UsageError(
                f"--submit-arg {name}={user_options[name]}: {count(gpus, 'GPU')} for"
                f" {job.accelerators * nodes} workers on {where}",
                hint=f"use --nproc-per-node {max(1, gpus // nodes)}, or --device cpu",
            )


def _count_gpus(text: str, *, is_gres: bool) -> int:
    """Return the number of GPUs in ``gpu:a100:4`` or ``a100:4,h100:4``; 0 if it is unknown."""
    total = 0
    for each in text.split(","):
        words = each.split(":")
        kind, last = words[0], words[-1]
        if is_gres and kind != "gpu":
            continue
        number = 1 if is_gres and len(words) == 1 else int(last) if last.isdecimal() else 0
        if not number:
            return 0
        total += number
    return total


def _check_signal(value: str, request: LaunchRequest) -> None:
    """Refuse a signal that would end the job before its ranks can react."""
    flags, _, rest = value.rpartition(":")
    if "B" in flags:
        raise UsageError(
            f"--submit-arg --signal={value}: `B` signals only the batch shell, which would end"
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
            f"--submit-arg --signal={value}: {signum.name} would end meshrun",
            hint=f"add --forward {signum.name.removeprefix('SIG')} to pass it to the ranks instead",
        )
