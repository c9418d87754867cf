"""``--where`` and ``--report-bug``: what is detected here, and what a launch would start."""

from __future__ import annotations

import io
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout

from meshrun import __version__, app
from meshrun.cli.options import Options
from meshrun.cli.read import build_request, read_program, with_hosts
from meshrun.cluster import ClusterFacts
from meshrun.errors import HostError, MeshrunError, UsageError
from meshrun.host.detect_host import detect_host
from meshrun.host.nvml import ask_driver, read_driver_version
from meshrun.host.printable import MASK, Mask, is_secret, printable
from meshrun.plan.rank_program import Program
from meshrun.plan.scheduler_defaults import apply_cluster
from meshrun.plan.surroundings import read_cluster_facts
from meshrun.rendezvous.secret import read_secret
from meshrun.report.detected import Detected, render_detected, render_detected_json
from meshrun.report.plan_output import print_plan, print_text
from meshrun.report.result_text import render_error
from meshrun.wording import count, size

_PACKAGES = ("torch", "numpy", "rich", "psutil", "threadpoolctl", "cloudpickle", "msgspec")
_VARIABLES = re.compile(
    r"(MESHRUN|PET|TORCH|TORCHELASTIC|NCCL|RCCL|GLOO|UCX|FI|OMP|MKL|OPENBLAS|GOMP|CUDA|NVIDIA|HIP|ROCR"
    r"|ZE|SLURM|OMPI|PMI|PMIX|PRTE|HYDRA|KUBERNETES|JOB|SKYPILOT|MASTER|PYTHON)_"
    r"|(RANK|LOCAL_RANK|WORLD_SIZE|NO_COLOR|TERM|CI)$"
)
"""Variables that affect meshrun, torch or their libraries."""
_ABOUT_THE_USER = ("_USER", "_ACCOUNT")
"""How the names of those among them end that name the user."""


def show_where(options: Options) -> int:
    """Print what is detected and what would be started, and return the exit code of a launch."""
    if options.format == "svg":
        raise UsageError("--where cannot draw a picture", hint="use --format text or json")
    found = detect(options)
    render = render_detected_json if options.format == "json" else render_detected
    print_text(f"{render(found)}\n", options.output)
    return found.error.exit_code if found.error is not None else 0


def detect(options: Options) -> Detected:
    """Detect the scheduler and plan a launch, without starting anything.

    Raises:
        UsageError: If the command line does not describe a launch.
    """
    has_program = bool(options.line.program)
    program = read_program(options) if has_program else Program(kind="script", target="")
    request = with_hosts(build_request(options, program), options)
    facts: ClusterFacts | None = None
    try:
        facts = read_cluster_facts(request)
        request = apply_cluster(request, facts)
        planned = app.plan(request, check_host=False, cluster=facts)
    except MeshrunError as error:
        return Detected(facts=facts, request=request, error=error)
    config = planned.rendezvous
    has_secret = config is not None and bool(read_secret(os.environ, config))
    return Detected(facts=facts, request=request, plan=planned, has_secret=has_secret)


def render_bug_report(options: Options) -> str:
    """Return the report, without starting anything or importing torch."""
    mask, line = Mask(options.env), options.line
    variables = [
        f"{name}={MASK if is_secret(name) or name.endswith(_ABOUT_THE_USER) else mask.text(value)}"
        for name, value in sorted(options.env.items())
        if _VARIABLES.match(name)
    ]
    detected, plan = _detected_and_plan(options)
    parts = {
        "Versions": "\n".join(_versions()),
        "Machine": "\n".join(_machine()),
        "Detected": mask.text(detected),
        "Environment": "\n".join(variables),
        "Command line": " ".join(["meshrun", *mask.words(line.words())]),
        "Plan": mask.text(plan),
    }
    report = "\n".join(
        f"### {title}\n\n```text\n{text.rstrip() or 'none'}\n```\n" for title, text in parts.items()
    )
    if home := options.env.get("HOME", "").rstrip("/"):  # which contains the user's name
        report = re.sub(rf"{re.escape(home)}(?=[/\s:]|$)", "~", report)
    return printable(report.rstrip())


def _versions() -> Iterator[str]:
    from importlib.metadata import PackageNotFoundError, version

    yield f"meshrun {__version__}"
    yield f"{platform.python_implementation()} {platform.python_version()} at {sys.executable}"
    for name in _PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"{name} is not installed"


def _machine() -> Iterator[str]:
    import psutil

    libc = " ".join(platform.libc_ver())
    yield f"{platform.system()} {platform.release()} on {platform.machine()}, {libc}"
    facts = detect_host(with_gpus=False)
    memory = size(psutil.virtual_memory().total)
    yield f"{count(facts.usable_cores, 'usable core')}, {memory} of memory"
    yield f"torch is built for {facts.accelerator or 'cpu'}"
    try:
        facts = detect_host()
        driver = ask_driver(read_driver_version)
    except HostError as error:
        yield error.message
    else:
        if driver:
            yield f"NVIDIA driver {driver}"
        yield from (f"GPU {gpu.label}: {gpu.model or 'model unknown'}" for gpu in facts.gpus)


def _detected_and_plan(options: Options) -> tuple[str, str]:
    """Return what was detected, and the plan or the error that prevents it."""
    detected = ""
    try:
        found = detect(options)
        detected = render_detected(found)
        if found.error is not None:
            raise found.error
    except MeshrunError as error:
        return detected, render_error(error)
    if not options.line.program or found.plan is None:
        return detected, "none; repeat the options and the program of the launch after --report-bug"
    with redirect_stdout(io.StringIO()) as printed:
        print_plan(found.plan, "text")
    return detected, re.sub(r"[ \t]+$", "", printed.getvalue(), flags=re.MULTILINE)
