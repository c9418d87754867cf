"""``--submit``: from what was asked for to a job of a scheduler."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshrun.cli.option import Option
from meshrun.cli.options import Options
from meshrun.cli.parsers import text_of_file
from meshrun.cli.words import CommandLine
from meshrun.errors import HostError, UsageError
from meshrun.host.descriptors import say
from meshrun.host.devices import accelerator_of_torch
from meshrun.host.machine import UNKNOWN_HOST
from meshrun.plan.masking import Mask
from meshrun.plan.parse import parse_choice
from meshrun.plan.plan import build_plan
from meshrun.plan.request import LaunchRequest
from meshrun.protocol.packing import read_json
from meshrun.report.plan_output import print_text
from meshrun.ssh.remote_command import asked_for
from meshrun.start import own_command
from meshrun.submit.job import Job, check_texts, job_name
from meshrun.submit.manifests import KINDS, render_manifest, render_rest, render_workload
from meshrun.submit.patch import Patch, read_patches
from meshrun.submit.pod import why_no_probes
from meshrun.submit.sbatch import output_of, render_sbatch
from meshrun.submit.send import hand_in
from meshrun.submit.slurm_options import names_container, options_in
from meshrun.supervisor.program_file import check_folder

_GPUS = "use --submit-arg=--gres=... to request GPUs by their name here, or --device cpu for none"
_TOO_MUCH = (
    "request less, as with --submit-arg=--cpus-per-task=8; `sinfo -o '%P %c %G'` lists the nodes"
)
_SCHEDULERS = ("slurm", *KINDS, "ray")
_OF_THE_SUBMISSION = (
    *(Options.submit, Options.submit_arg, Options.submit_patch, Options.image, Options.module),
    *(Options.export, Options.rdzv_backend),  # the job has them in its own way
    # Without hosts of no effect:
    *(Options.include, Options.exclude, Options.ssh, Options.connect_timeout),
)
_APPLY = ("kubectl", "apply", "--server-side", "--force-conflicts", "-f", "-")
"""By the server, as kubectl itself would repeat the objects in annotations, secrets too."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
"""Not what bash calls the functions that it exports."""
_ELASTIC = ("slurm", *(name for name, kind in KINDS.items() if not kind.why_fixed))
_FOUND_BY_THEMSELVES = "the nodes of a job find each other"
_CHOSEN = "the scheduler chooses a job's hosts"
_OF_NO_JOB: Mapping[Option[Any], str] = {
    Options.node_rank: _FOUND_BY_THEMSELVES,
    Options.rdzv_endpoint: _FOUND_BY_THEMSELVES,
    Options.rdzv_backend: _FOUND_BY_THEMSELVES,
    Options.master_addr: _FOUND_BY_THEMSELVES,
    Options.local_addr: _FOUND_BY_THEMSELVES,
    Options.standalone: _FOUND_BY_THEMSELVES,
    Options.hosts: _CHOSEN,
    Options.hostfile: _CHOSEN,
    Options.debug_rank: "a job has no terminal",
    Options.interactive: "a job has no terminal",
    Options.watch: "a job runs once",
}
"""Options that make no sense for a job, and why."""
_OF_MANIFESTS: Sequence[tuple[Option[Any], str, str]] = (
    (Options.submit_patch, "a Slurm job has no manifest", "use --submit-arg for options of sbatch"),
    (Options.export, "a Slurm job inherits the environment of the shell", "remove --export"),
)


def submit(options: Options, request: LaunchRequest, line: CommandLine) -> int:
    """Submit a launch as a job, or print the job.

    Raises:
        UsageError: If an option makes no sense for a job.
        HostError: If the scheduler is not here, or refuses.
    """
    scheduler = parse_choice(options.submit or "", Options.submit.flag, _SCHEDULERS)
    check_job(options, scheduler)
    dry_run, output = options.dry_run, options.output
    for note in request.notes:
        say(f"meshrun: {note}")
    job = _job(scheduler, options, request, line)
    if scheduler == "slurm":
        return _slurm(job, dry_run, output)
    return _kubernetes(scheduler, job, dry_run, output)


def _slurm(job: Job, dry_run: bool, output: str | None) -> int:
    folder = check_folder()
    script = render_sbatch(job, launcher=own_command("launcher"), folder=folder)
    check_texts(script)
    if dry_run:
        print_text(script, output)
        return 0
    printed = hand_in(
        ["sbatch", "--parsable"], script, hints={"gres": _GPUS, "node configuration": _TOO_MUCH}
    )
    job_id = printed.splitlines()[-1].partition(";")[0]
    print_text(f"{job_id}\n", None)
    output_file = output_of(job_id, job, folder)
    say(f"meshrun: submitted Slurm job {job_id}, {job.name}; output: {output_file}")
    return 0


def _kubernetes(kind: str, job: Job, dry_run: bool, output: str | None) -> int:
    manifest = render_manifest(job, kind)
    if why := why_no_probes(job):
        say(f"meshrun: no probes in the manifest: {why}; use --metrics 0.0.0.0:9400")
    if dry_run:
        print_text(manifest, output)
        return 0
    other = (
        f"`kubectl delete` the existing `{job.name}`, or leave out --rdzv-id for a name of its own"
    )
    created = hand_in(
        ["kubectl", "create", "-f", "-", "-o", "json"],
        render_workload(job, kind),
        extras=job.extras,
        hints={"AlreadyExists": other, "already exists": other},
    )
    owner, title = _created(created)
    # What is left of an earlier job of that name may be there still. The secret is never printed.
    rest = render_rest(job, kind, secrets.token_hex(32), owner)
    try:
        printed = hand_in(_APPLY, rest, extras=job.extras)
    except HostError:
        hand_in(["kubectl", "delete", "-f", "-"], render_workload(job, kind), extras=job.extras)
        raise
    print_text(f"{title} created\n{printed}\n", None)
    return 0


def _created(text: str) -> tuple[dict[str, Any], str]:
    """Return (the owner of what belongs to a job, its name for people), as kubectl printed it."""
    try:
        found = read_json(text)
        version, kind, metadata = found["apiVersion"], found["kind"], found["metadata"]
        name, uid = metadata["name"], metadata["uid"]
    except (ValueError, KeyError, TypeError) as error:
        raise HostError(
            f"kubectl created the job, but its output does not name it: {text[:200]}",
            hint="remove any --submit-arg that chooses another output format",
        ) from error
    owner = {"apiVersion": version, "kind": kind, "name": name, "uid": uid}
    return owner, f"{kind.lower()}.{version.rpartition('/')[0]}/{name}"


def _job(scheduler: str, options: Options, request: LaunchRequest, line: CommandLine) -> Job:
    if request.rendezvous.least_nodes is not None:
        request = replace(request, rendezvous=replace(request.rendezvous, backend="c10d"))
    # The job runs elsewhere: what this machine has, or its scheduler says, counts for nothing.
    plan = build_plan(request, UNKNOWN_HOST, check_host=False)
    counts = plan.layout.nproc_per_node
    if len(set(counts)) > 1:
        raise UsageError(
            "--submit requires the same number of workers on each node, found"
            f" {', '.join(map(str, counts))}",
            hint="use --nproc-per-node with one number",
        )
    program = request.program
    pairs = words_again(options)
    if request.nnodes is None:
        pairs = (*pairs, ("--nnodes", "1"))
    words = (*(("-m",) if options.module else ()), *line.program_words)
    _warn_of_secrets([word for pair in pairs for word in pair], words)
    exported = () if scheduler == "slurm" else _exported(options.export)
    texts = [word for pair in (*pairs, *exported) for word in pair]
    check_texts(*words, *texts)
    in_image = options.image is not None or names_container(options.submit_arg)
    suffix = "" if scheduler == "slurm" else secrets.token_hex(3)
    theirs = dict(options_in(options.submit_arg)) if scheduler == "slurm" else {}
    name = job_name(request.rendezvous.run_id, program.target, suffix=suffix)
    return Job(
        plan=plan,
        name=theirs.get("--job-name") or name,
        options=pairs,
        program=words,
        extras=options.submit_arg,
        accelerators=0 if _on_cores(scheduler, request, in_image=in_image) else max(counts),
        image=options.image,
        patches=() if scheduler == "slurm" else _patches(options.submit_patch),
        exported=exported,
    )


def _exported(asked: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return variables that pods can have, without the secret, as each job has its own."""
    return tuple(
        (name, value)
        for name, value in asked_for(os.environ, asked).items()
        if _VARIABLE.fullmatch(name) and name != "MESHRUN_SECRET"
    )


def _patches(paths: Sequence[str]) -> tuple[Patch, ...]:
    texts = [(text_of_file(path, Options.submit_patch.flag), path) for path in paths]
    return tuple(patch for text, path in texts for patch in read_patches(text, path))


def check_job(options: Options, scheduler: str) -> None:
    """Refuse what can be known of one node alone, or once the job runs.

    Raises:
        UsageError: With the option.
    """
    workers, nodes = options.nproc_per_node, options.nnodes
    is_range = nodes is not None and nodes[0] < nodes[1]
    own_backends = ("static", "c10d") if is_range and scheduler != "ray" else ("static",)
    for row, why in _OF_NO_JOB.items():
        source = options.source(row)
        if not source or (row is Options.rdzv_backend and options.rdzv_backend in own_backends):
            continue
        raise UsageError(
            f"--submit cannot be used with {row.flag}{options.in_variable(row)}: {why}",
            hint=f"unset {source}" if source.isupper() else f"remove {row.flag}",
        )
    for row in (Options.rank, Options.color_dim, Options.format):
        if options.text(row) not in (None, "text"):
            raise UsageError(
                f"--submit cannot be used with {row.flag}: a dry run prints the job itself",
                hint=f"remove {row.flag}, or remove --submit to see the plan",
            )
    if isinstance(workers, str):
        raise UsageError(
            f"--submit cannot be used with --nproc-per-node {workers}: the devices and cores of"
            " the nodes are not known here",
            hint="use a number, such as --nproc-per-node 8",
        )
    if is_range and nodes is not None and scheduler not in (*_ELASTIC, "ray"):
        raise UsageError(
            f"--submit {scheduler} requires a fixed number of nodes, found --nnodes"
            f" {nodes[0]}:{nodes[1]}: {KINDS[scheduler].why_fixed}",
            hint=f"use --nnodes {nodes[1]}, or --submit {', '.join(_ELASTIC[:-1])} or"
            f" {_ELASTIC[-1]}",
        )
    for row, why, hint in _OF_MANIFESTS if scheduler == "slurm" else ():
        if options.is_typed(row):
            raise UsageError(f"--submit slurm cannot be used with {row.flag}: {why}", hint=hint)
    if options.output is not None and not options.dry_run:
        raise UsageError("--output requires --dry-run")


def words_again(options: Options) -> tuple[tuple[str, ...], ...]:
    """Return the options that were given, by whatever way, as words of a command line."""
    words: list[tuple[str, ...]] = []
    for row in options.of_the_launch():
        given = options.values[row.name]
        if row in _OF_THE_SUBMISSION or given is None or given is False:
            continue
        texts = given if row.repeats else [given]
        words += [(row.flag,) if text is True else _pair(row.flag, text) for text in texts]
    return tuple(words)


def _pair(option: str, value: str) -> tuple[str, ...]:
    return (f"{option}={value}",) if value.startswith("-") else (option, value)


def _on_cores(scheduler: str, request: LaunchRequest, *, in_image: bool) -> bool:
    """Whether ranks need no accelerators: asked for, or this torch, if Slurm's nodes use it too."""
    if request.device != "auto":
        return request.device == "cpu"
    return scheduler == "slurm" and not in_image and accelerator_of_torch() is None


def _warn_of_secrets(*parts: list[str] | tuple[str, ...]) -> None:
    mask = Mask(os.environ)
    for words in parts:
        for word, shown, before in zip(words, mask.words(words), ["", *words], strict=False):
            if word != shown and not word.isdecimal():
                name = before if shown == "***" else shown.partition("=")[0]
                say(
                    f"meshrun: {name} looks like a secret, and the job contains it as plain text;"
                    " use an environment variable instead"
                )
