"""``--submit``: submit a launch as a job of a scheduler, or launch on nodes of a Ray cluster."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from meshrun.cli.option import Option
from meshrun.cli.options import CONTROLLER_OPTIONS, HOSTS, SUBMIT, Options, forget_variables
from meshrun.cli.parsers import text_of_file
from meshrun.cli.words import as_words
from meshrun.errors import HostError, UsageError
from meshrun.host.detect_host import detect_host
from meshrun.host.machine import UNKNOWN_HOST
from meshrun.host.own_variables import SECRET
from meshrun.host.printable import Mask
from meshrun.host.stderr import note
from meshrun.host.visibility import CUDA, HIP, OUTSIDE_TORCH, ROCR, XPU
from meshrun.plan.parse import parse_choice, split_words
from meshrun.plan.plan import build_plan
from meshrun.plan.rendezvous_options import C10D, STATIC
from meshrun.plan.request import LaunchRequest
from meshrun.plan.scheduler_defaults import apply_hosts
from meshrun.protocol.caller import Invocation
from meshrun.protocol.packing import read_json
from meshrun.report.plan_output import print_text
from meshrun.ssh.remote_command import requested_variables
from meshrun.start import own_command
from meshrun.submit import manifests
from meshrun.submit.documents import read_patches
from meshrun.submit.job import Job, check_texts, job_name
from meshrun.submit.sbatch import names_container, options_in, output_of, render_sbatch
from meshrun.supervisor.program_file import check_folder, check_program
from meshrun.wording import either

_GRES_HINT = (
    "use --submit-arg=--gres=... to request GPUs by their name here, or --device cpu for none"
)
_RESOURCES_HINT = (
    "request less, as with --submit-arg=--cpus-per-task=8; `sinfo -o '%P %c %G'` lists the nodes"
)
_APPLY = ("kubectl", "apply", "--server-side", "--force-conflicts", "-f", "-")
"""On the server side; kubectl itself would copy the objects, including secrets, to annotations."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
"""A variable that a pod can have, unlike the functions that bash exports."""
_ELASTIC = ("slurm", *(name for name, kind in manifests.KINDS.items() if not kind.why_fixed))
_IN_OTHER_WAYS = (Options.module, Options.rdzv_backend)
"""Options that a job expresses in other ways than its launchers' command lines."""
_RENDEZVOUS: tuple[Option[Any], ...] = (
    Options.node_rank, Options.rdzv_endpoint, Options.rdzv_backend,
    Options.master_addr, Options.local_addr, Options.standalone,
)  # fmt: skip
_INCOMPATIBLE: Mapping[Option[Any], str] = {
    **dict.fromkeys(_RENDEZVOUS, "the nodes of a job find each other"),
    **dict.fromkeys((Options.hosts, Options.hostfile), "the scheduler chooses a job's hosts"),
    **dict.fromkeys((Options.debug_rank, Options.interactive), "a job has no terminal"),
    Options.watch: "a job runs once",
}
"""Options that make no sense for a job, and why."""
_INCOMPATIBLE_WITH_SLURM: Sequence[tuple[Option[Any], str, str]] = (
    (Options.submit_patch, "a Slurm job has no manifest", "use --submit-arg for options of sbatch"),
    (Options.export, "a Slurm job inherits the environment of the shell", "remove --export"),
)
"""Options with the reason and a hint."""
_INCOMPATIBLE_WITH_RAY = (
    Options.image, Options.submit_patch, Options.ssh, Options.launcher, Options.include,
    Options.exclude,
)  # fmt: skip
_CONNECT_TIMEOUT_S = 60.0
"""How long a node may take to answer, as it first has to start an interpreter with Ray."""
_DEVICES = (CUDA, HIP, ROCR, XPU, *OUTSIDE_TORCH)
"""Variables that Ray sets on each node; their values here do not apply there."""


def submit(options: Options, request: LaunchRequest) -> int:
    """Submit a launch as a job, or print the job.

    Raises:
        UsageError: If an option makes no sense for a job.
        HostError: If the scheduler's command does not exist or fails.
    """
    scheduler = parse_choice(options.submit or "", Options.submit.flag, Options.submit.suggested)
    check_job(options, scheduler)
    for text in request.notes:
        note(text)
    job = _job(scheduler, options, request)
    if scheduler == "slurm":
        _submit_to_slurm(job, options)
    else:
        _submit_to_kubernetes(scheduler, job, options)
    return 0


def _submit_to_slurm(job: Job, options: Options) -> None:
    folder = check_folder()
    script = render_sbatch(job, launcher=own_command("launcher"), folder=folder)
    check_texts(script)
    if options.dry_run:
        print_text(script, options.output)
        return
    hints = {"gres": _GRES_HINT, "node configuration": _RESOURCES_HINT}
    printed = _run_with_input(["sbatch", "--parsable"], script, hints=hints)
    job_id = printed.splitlines()[-1].partition(";")[0]
    print_text(f"{job_id}\n", None)
    output_file = output_of(job_id, job, folder)
    note(f"submitted Slurm job {job_id}, {job.name}; output: {output_file}")


def _submit_to_kubernetes(kind: str, job: Job, options: Options) -> None:
    manifest = manifests.render_manifest(job, kind)
    if why := manifests.why_no_probes(job):
        note(f"no probes in the manifest: {why}; use --metrics 0.0.0.0:9400")
    if options.dry_run:
        print_text(manifest, options.output)
        return
    hint = f"`kubectl delete` the existing `{job.name}`, or leave out --rdzv-id to get a new name"
    created = _run_with_input(
        ["kubectl", "create", "-f", "-", "-o", "json"],
        manifests.render_workload(job, kind),
        extras=job.extras,
        hints={"AlreadyExists": hint, "already exists": hint},
    )
    owner, title = _created(created)
    # Objects of an earlier job of that name may still exist. The secret is never printed.
    rest = manifests.render_rest(job, kind, secrets.token_hex(32), owner)
    try:
        printed = _run_with_input(_APPLY, rest, extras=job.extras)
    except HostError:
        workload = manifests.render_workload(job, kind)
        _run_with_input(["kubectl", "delete", "-f", "-"], workload, extras=job.extras)
        raise
    print_text(f"{title} created\n{printed}\n", None)


def _run_with_input(
    command: Sequence[str],
    text: str,
    *,
    extras: Sequence[str] = (),
    hints: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Run sbatch or kubectl with ``text`` on its stdin; return what it printed.

    ``extras`` are the user's additional options, each a text of one or more words; ``hints`` are
    keyed by a text that an error message contains.

    Raises:
        UsageError: If the user's options cannot be split into words.
        HostError: If the command is not installed, or fails.
    """
    added = [word for extra in extras for word in split_words(extra, "--submit-arg")]
    name = command[0]
    if shutil.which(name) is None:
        raise HostError(
            f"{name} is not installed on this machine",
            hint=f"write the job with --dry-run -o FILE, and run {name} where it is installed",
        )
    done = subprocess.run(
        [*command, *added],
        input=text,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode:
        reason = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        hint = next((hint for part, hint in hints.items() if part in reason), None)
        raise HostError(f"{name} refused the job: {reason}", hint=hint)
    return done.stdout.strip()


def _created(text: str) -> tuple[dict[str, Any], str]:
    """Return a job from kubectl's output, as an owner reference and as its printed name."""
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


def _job(scheduler: str, options: Options, request: LaunchRequest) -> Job:
    if request.rendezvous.is_elastic:
        request = replace(request, rendezvous=replace(request.rendezvous, backend=C10D))
    # The facts about this machine and its scheduler do not apply to the job, which runs elsewhere.
    plan = build_plan(request, UNKNOWN_HOST, check_host=False)
    counts = plan.layout.nproc_per_node
    if len(set(counts)) > 1:
        raise UsageError(
            "--submit requires the same number of workers on each node, found"
            f" {', '.join(map(str, counts))}",
            hint="use --nproc-per-node with one number",
        )
    program = request.program
    pairs = option_words(options)
    if request.nnodes is None:
        pairs = (*pairs, ("--nnodes", "1"))
    words = (*(("-m",) if options.module else ()), *options.line.program_words)
    _warn_of_secrets([word for pair in pairs for word in pair], words)
    is_slurm = scheduler == "slurm"
    exported = () if is_slurm else _exported(options.export)
    flag = Options.submit_patch.flag
    paths = () if is_slurm else options.submit_patch
    patches = [read_patches(text_of_file(path, flag), path) for path in paths]
    texts = [word for pair in (*pairs, *exported) for word in pair]
    check_texts(*words, *texts)
    in_image = options.image is not None or names_container(options.submit_arg)
    suffix = "" if is_slurm else secrets.token_hex(3)
    sbatch_options = options_in(options.submit_arg) if is_slurm else {}
    name = job_name(request.rendezvous.run_id, program.target, suffix=suffix)
    return Job(
        plan=plan,
        name=sbatch_options.get("--job-name") or name,
        options=pairs,
        program=words,
        extras=options.submit_arg,
        accelerators=0 if _on_cores(scheduler, request, in_image=in_image) else max(counts),
        image=options.image,
        patches=tuple(chain.from_iterable(patches)),
        exported=exported,
    )


def _exported(patterns: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the variables that pods can have, except the secret, as each job has its own."""
    forget_variables(CONTROLLER_OPTIONS)
    return tuple(
        (name, value)
        for name, value in requested_variables(os.environ, patterns).items()
        if _VARIABLE.fullmatch(name) and name != SECRET
    )


def _on_cores(scheduler: str, request: LaunchRequest, *, in_image: bool) -> bool:
    """Whether ranks need no accelerators.

    ``--device`` says so, or else the torch that is installed here if the Slurm job uses it.
    """
    if request.device != "auto":
        return request.device == "cpu"
    is_used = scheduler == "slurm" and not in_image
    return is_used and detect_host(with_gpus=False).accelerator is None


def check_job(options: Options, scheduler: str) -> None:
    """Reject options of a single node, and those that depend on where the job runs.

    Raises:
        UsageError: If one is given.
    """
    workers, nodes = options.nproc_per_node, options.nnodes
    is_range = nodes is not None and nodes[0] < nodes[1]
    own_backends = (STATIC, C10D) if is_range and scheduler != "ray" else (STATIC,)
    for row, why in _INCOMPATIBLE.items():
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
            f" {nodes[0]}:{nodes[1]}: {manifests.KINDS[scheduler].why_fixed}",
            hint=f"use --nnodes {nodes[1]}, or --submit {either(_ELASTIC)}",
        )
    for row, why, hint in _INCOMPATIBLE_WITH_SLURM if scheduler == "slurm" else ():
        if options.is_typed(row):
            raise UsageError(f"--submit slurm cannot be used with {row.flag}: {why}", hint=hint)
    if options.output is not None and not options.dry_run:
        raise UsageError("--output requires --dry-run")


def option_words(options: Options) -> tuple[tuple[str, ...], ...]:
    """Return the options that were typed or set by variables as words of a command line."""
    words: list[tuple[str, ...]] = []
    for row in options.given_for_launch():
        given = options.values[row.name]
        if row.panel in (SUBMIT, HOSTS) or row in _IN_OTHER_WAYS or given is False:
            continue
        texts = given if row.repeats else [given]
        words += [as_words(row.flag, None if text is True else text) for text in texts]
    return tuple(words)


def _warn_of_secrets(*parts: list[str] | tuple[str, ...]) -> None:
    mask = Mask(os.environ)
    for words in parts:
        for word, shown, before in zip(words, mask.words(words), ["", *words], strict=False):
            if word != shown and not word.isdecimal():
                name = before if shown == "***" else shown.partition("=")[0]
                note(
                    f"{name} looks like a secret, and the job contains it as plain text;"
                    " use an environment variable instead"
                )


def launch_on_ray(options: Options, request: LaunchRequest, invocation: Invocation) -> int:
    """Launch on nodes of a Ray cluster, or print the request to it; return the exit code.

    Raises:
        UsageError: If an option makes no sense with Ray.
        HostError: If there is no cluster, or it cannot provide the nodes.
    """
    from meshrun.actors.bundles import read_placement, render_placement
    from meshrun.actors.ray_cluster import RayCluster
    from meshrun.cli.on_hosts import launch_on_hosts
    from meshrun.worker.function import PROGRAM

    check_job(options, "ray")
    for row in _INCOMPATIBLE_WITH_RAY:
        if options.is_typed(row):
            raise UsageError(f"--submit ray cannot be used with {row.flag}")
    least = request.rendezvous.least_nodes
    request = replace(request, nnodes=request.nnodes or 1)
    # The facts about this machine and its scheduler do not apply to the cluster.
    fixed = replace(request, rendezvous=replace(request.rendezvous, least_nodes=None))
    plan = build_plan(fixed, UNKNOWN_HOST, check_host=False)
    placement = read_placement(
        options.submit_arg,
        workers=plan.layout.nproc_per_node,
        min_nodes=least or plan.layout.nnodes,
        device=request.device,
    )
    if options.dry_run:
        print_text(render_placement(placement), options.output)
        return 0
    check_program(request.program)
    is_call = invocation.caller is not None and request.program.target == PROGRAM
    grace_s = request.shutdown_timeout_s + request.rendezvous.node_timeout_s
    cluster = RayCluster(call=request.program.args[-1] if is_call else None, grace_s=grace_s)
    try:
        access = request.access
        if not options.is_typed(Options.connect_timeout):
            access = replace(access, connect_timeout_s=_CONNECT_TIMEOUT_S)
        remote = cluster.place(placement, access, note)
        for name in _DEVICES:
            os.environ.pop(name, None)
        return launch_on_hosts(options, apply_hosts(request, remote))
    finally:
        cluster.close()
