"""The table of options, from which everything else about options is derived.

A row defines the flags, ``--help``, ``--print-completion``, the pages of the reference and the
value that the code reads: ``options.max_restarts`` is an ``int``, and mypy rejects a misspelled
name. A text is parsed when its value is read, so errors are raised in the order of use.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, get_args

from meshrun.check.requirements import Requirement, parse_requirements
from meshrun.cli import parsers as parse
from meshrun.cli.option import PET, OneOf, Option, ParsedOptions, Repeated, Switch
from meshrun.plan import choices
from meshrun.plan.device import COUNTED, check_device_type
from meshrun.plan.hardware import parse_gpus
from meshrun.plan.parse import (
    COUNT_WORDS,
    NO_STREAMS,
    GpuMemoryWait,
    parse_gpu_memory_wait,
    parse_integer,
    parse_local_ranks,
    parse_nnodes,
    parse_seconds,
    parse_signals,
    parse_streams,
    parse_workers,
)
from meshrun.plan.rendezvous_options import (
    BACKENDS,
    C10D,
    DEFAULT_PORT,
    SETTINGS,
    STATIC,
    parse_rendezvous_settings,
)
from meshrun.wording import either

if TYPE_CHECKING:
    from meshrun.layout.placing import Place

GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
TEMPLATE_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
MESH = "Mesh"
WORKERS = "Workers"
HOSTS = "Hosts"
PROGRAM = "Program"
PREVIEW = "Preview"
SUBMIT = "Submit"
OUTPUT = "Output"
FAILURES = "Failures and shutdown"
LOGS = "Log files"
RENDEZVOUS = "Rendezvous"
ACCEPTED = "Accepted from torchrun, without effect"
OTHER = "Other"
TOPICS = {
    "mesh": (MESH,), "workers": (WORKERS,), "nodes": (WORKERS, HOSTS, RENDEZVOUS),
    "program": (PROGRAM,), "preview": (PREVIEW,), "submit": (SUBMIT,), "output": (OUTPUT,),
    "failures": (FAILURES,), "logs": (LOGS,), "rendezvous": (RENDEZVOUS,),
    "other": (ACCEPTED, OTHER),
}  # fmt: skip
"""The panels that ``--help TOPIC`` shows."""

Names = tuple[str, ...]
Settings = tuple[tuple[str, str], ...]
Signals = tuple[tuple[int, ...], tuple[str, ...]]
"""Signals, and names that are not signals."""


def _code(words: Iterable[str]) -> list[str]:
    return [f"`{word}`" for word in words]


class Options(ParsedOptions):
    """Every option, in the order of the help."""

    __slots__ = ()

    # fmt: off
    mesh = Option(parse.as_written, None, "SPEC", MESH,
        "Shape of the mesh, such as `dp=2,tp=4` or `2x4`. The rightmost dim varies fastest, as in "
        "torch. One size may be `-1`, or a range such as `2:8`.",
        details="See [mesh specs](mesh-spec.md). Without a mesh, no "
        "process group is created before the program runs.",
        brief="Shape of the mesh; the last dim varies fastest")
    names = Option(parse.as_written, None, "A,B", MESH,
        "Names for the dims of a mesh given as sizes alone, such as `2x4`.",
        brief="Names of its dims, if SPEC is sizes alone")
    device = Option(check_device_type, "auto", "TYPE", MESH,
        "Device type: `auto`, `cpu`, `cuda` or another torch device type. `auto` uses the "
        "accelerator if there is one for each worker, otherwise `cpu`.",
        details="See [accelerators outside torch](../how-to/other-accelerators.md).",
        suggested=("auto", *COUNTED))
    gpus: Option[Names | None] = Option(parse_gpus, None, "0,2-3", MESH,
        "GPUs of each node to use, by number, UUID or MIG name.", unset="all visible ones",
        details="Numbers refer to the GPUs that `CUDA_VISIBLE_DEVICES` makes visible. "
        "See [how to choose GPUs](../how-to/gpus.md).")
    flatten = Repeated(parse.joined, "[NAME=]A+B", MESH,
        "Flatten several dims into one, such as `dp_cp=dp+cp`. Repeatable.",
        details="See [derived dims](mesh-spec.md#derived-dims).")
    view = Repeated(parse.joined, "NAME:SPEC", MESH,
        "Add another factorization of the same ranks, such as `moe:pp=2,efsdp=-1,ep=8`. "
        "Repeatable.", details="See [derived dims](mesh-spec.md#derived-dims).")
    intra_node = Repeated(parse.dims, "DIM[,DIM]", MESH,
        "Require each group of these dims, taken together, to lie within one node.",
        details="See [how to place ranks](../how-to/place-ranks.md).")
    intra_domain = Repeated(parse.dims, "DIM[,DIM]", MESH,
        "Require each group of these dims, taken together, to lie within one NVLink domain.",
        details="See [domains](../how-to/place-ranks.md#domains-of-several-nodes).")
    domain_size = Option(parse.positive, None, "N", MESH,
        "Number of consecutive nodes that share an NVLink domain, such as `18`.",
        unset="what the nodes report", details="The last domain may have fewer.")
    place: Option[Place] = OneOf(choices.PLACES, MESH,
        "How to number ranks: node by node, or (`auto`) so that `--intra-node` and "
        "`--intra-domain` hold.")
    backend = Repeated(parse.joined, "[DIM=]NAME", MESH,
        "Backend for the groups of all dims, or of one dim, such as `tp=nccl`. Repeatable.",
        unset="torch's choice", details="`pp=cpu:gloo,cuda:nccl` names one per device type. A "
        "backend that torch lacks is an error; that of a package needs `--preload` or "
        "`--mesh-init lazy`.")
    timeout = Repeated(parse.joined, "[DIM=]TIME", MESH,
        "Timeout for collectives in all groups, or in those of one dim, such as `15m` or "
        "`tp=90s`. Repeatable.",
        unset="torch's choice", details="Without a dim it applies to the world's group too.")
    pg_opt = Repeated(parse.joined, "DIM:K=V", MESH,
        "Backend option for the groups of a dim, such as `tp:is_high_priority_stream=1`. "
        "Repeatable.", details="Commas separate several: `DIM:K=V,K=V`.")
    mesh_init = OneOf[choices.MeshInit](get_args(choices.MeshInit), MESH,
        "Build the mesh before the program's first line, or (`lazy`) at its first "
        "`current_mesh()`.", details="All ranks must reach that call. `lazy` is for programs that "
        "set `NCCL_*` variables themselves.")

    nproc_per_node = Option(parse_workers, None, "N", WORKERS,
        f"Workers per node: a number, {either(_code(COUNT_WORDS))}; or one number per node, "
        "such as `8,4`.", unset="what the mesh needs, else 1", family=PET,
        details="`auto` is one per accelerator, or per core if there is none. `gpu`, `xpu` or "
        "another device type is one per device; `cpu` is one per core this process may use.",
        brief="Workers per node",
        suggested=COUNT_WORDS)
    nnodes = Option(parse_nnodes, None, "N|MIN:MAX", WORKERS,
        "Number of nodes, or a range within which nodes may join and leave.",
        unset="what the scheduler says, else 1", family=PET,
        details="See [several nodes](../how-to/several-nodes.md). A [range](../how-to/elastic.md) "
        "needs `--hosts`, or `--rdzv-backend c10d` or another that counts nodes.",
        brief="Number of nodes, or a range of them")
    numa_binding = OneOf[choices.NumaBinding | None](choices.NUMA_BINDINGS, WORKERS,
        f"Bind each rank to the cores near its device: {either(_code(choices.NUMA_BINDINGS))}.",
        family=PET, details="Uses the kernel's topology: `exclusive` gives each "
        "rank its own share of the NUMA node's cores, `core-complex` cores that share a cache. "
        "Ranks without an accelerator are spread over the NUMA nodes.",
        default=None, metavar="MODE")
    nic_affinity = Switch(WORKERS,
        "Restrict each rank to the network cards nearest its GPU.",
        details="Sets variables of NCCL, gloo and UCX that are not set. See "
        "[network cards](../how-to/gpus.md#use-the-nearest-network-card).")
    virtual_local_rank = Switch(WORKERS,
        "Let each rank see only its own device, as device 0 with `LOCAL_RANK=0`.", family=PET)
    per_task = Switch(WORKERS,
        "If the scheduler starts a process per rank, run the program in it, with the mesh "
        "built before its first line.", family="", details="As in `srun --ntasks-per-node=8 "
        "meshrun --per-task --mesh dp=8 train.py`. See [a process per rank]"
        "(../how-to/other-schedulers.md#a-process-per-rank).")
    role = Option(parse.short, "default", "NAME", WORKERS,
        "Value of `ROLE_NAME` for the workers.", family=PET, details="It may differ between "
        "nodes; `ROLE_RANK` and `ROLE_WORLD_SIZE` count the workers of each role.")

    hosts = Option(parse.as_written, None, "A,B:8,...", HOSTS,
        "Start a launcher on each of these hosts over ssh. `B:8` runs 8 workers on B.",
        details="`user@host` works too. See [several hosts](../how-to/hosts.md).",
        brief="Launch on these hosts over ssh")
    hostfile = Option(parse.as_written, None, "FILE", HOSTS,
        "Read the hosts from a file with lines such as `host slots=8`, as for DeepSpeed and "
        "Open MPI.", details="`host:8` is read too.")
    include = Option(parse.as_written, None, "A@B:0,2", HOSTS,
        "Use only these hosts, or only some slots of a host.", unset="all",
        details="Slots count from 0; the ranks of a host see only those devices.")
    exclude = Option(parse.as_written, None, "A@B:0,2", HOSTS,
        "Use all hosts and slots except these.")
    export = Repeated(parse.variables, "NAME[,NAME]", HOSTS,
        "Also pass these environment variables to the hosts, or to a job on Kubernetes, such as "
        "`WANDB_API_KEY` or `HF_*`. Repeatable.",
        details="See [the environment](../how-to/hosts.md#environment) of hosts, and [of a job]"
        "(../how-to/submit.md#kubernetes).")
    ssh = Option(parse.as_written, "ssh", "COMMAND", HOSTS,
        "Command to run as ssh, such as `'ssh -F my_config'`.")
    launcher = Option(parse.as_written, None, "NAME", HOSTS,
        "How to start launchers on the hosts: `ssh`, `blaunch` of LSF, `qrsh` of Grid Engine, or a "
        "plugin.", unset="what the scheduler has, else `ssh`",
        suggested=("ssh", *choices.STARTERS_OF_SCHEDULERS),
        details="A plugin is an entry point of [`meshrun.launchers`](../how-to/plugins.md).")
    connect_timeout = Option(parse_seconds, 10.0, "TIME", HOSTS,
        "How long to wait for a host to answer.")

    module = Switch(PROGRAM,
        "Run the program as a module, like `python -m`.", short="-m", family=PET,
        brief="Run a module, like `python -m`")
    no_python = Switch(PROGRAM,
        "Run the program as a command, without Python.", family=PET,
        details="`current_mesh()` in it builds the mesh on first use.")
    run_path = Switch(PROGRAM,
        "Run the script without starting a new interpreter, which is the default.", family=PET)
    interactive = Switch(PROGRAM,
        "Open a Python prompt whose input runs on every rank, after the program if there is one.",
        family="", details="See [a prompt on all ranks](../how-to/prompt.md).")
    watch = Switch(PROGRAM,
        "Launch again whenever the program, or a file of the project that it imports, changes.",
        family="", details="Needs the extra `watch`. See [how to launch again after each change]"
        "(../how-to/launch-at-each-change.md).")
    preload = Repeated(parse.one, "MODULE", PROGRAM,
        "Also import this module once per node, before ranks are forked. Repeatable.",
        details="See [shared imports](../how-to/share-imports.md).")
    warm = Switch(PROGRAM,
        "Start ranks from a warm server, which has imported the program's libraries, and leave one "
        "for the next run.",
        details="See [the second run](../how-to/warm-starts.md).")
    warm_idle = Option(parse_seconds, 600.0, "TIME", PROGRAM,
        "End a warm server after it has been idle for this long.")
    warm_status = Switch(PROGRAM, "List your warm servers and exit.", family="")
    warm_stop = Switch(PROGRAM, "End your warm servers and exit; runs continue.", family="")
    start_method = OneOf[choices.AnyStartMethod | None](get_args(choices.AnyStartMethod), PROGRAM,
        "Fork ranks from one process per node that has imported torch, or (`exec`) start "
        "a fresh interpreter for each.", unset="`fork`", family=PET,
        details="torchrun's `forkserver` means `fork`; its `spawn` means `exec` with `--run-path`, "
        "and nothing without it.", default=None, metavar="fork|exec", suggested=("fork", "exec"))

    check = Switch(PREVIEW,
        "Measure the mesh instead of running a program: versions, limits, clocks, and the speed of "
        "each rank, link and group. `--check ... quick` takes seconds.", family="",
        details="See [how to check a mesh](../how-to/check-a-mesh.md).")
    check_path = Repeated(parse.one, "DIR", PREVIEW,
        "With `--check` or `--check-first`, also check that every rank can write to this "
        "directory. Repeatable.")
    require: Option[tuple[Requirement, ...]] = Option(parse_requirements, (), "DIM>=RATE", PREVIEW,
        "With `--check` or `--check-first`, exit with 1 if the bus bandwidth of a dim is lower, "
        "such as `tp>=300GB/s,dp>=40GB/s`.")

    dry_run = Switch(PREVIEW,
        "Print the plan and exit without starting anything.", short="-n",
        brief="Print the plan; start nothing")
    where = Switch(PREVIEW,
        "Print which scheduler is detected, from which variables, and what a launch here would "
        "start, and exit without starting anything.", family="",
        details="See [other schedulers](../how-to/other-schedulers.md#find-out-what-is-detected). "
        "No program is needed; `--format json` prints JSON.")
    format = OneOf[choices.Format](choices.FORMATS, PREVIEW,
        "Format of the plan, or of what `--check` found. `svg` draws the layout.", details="See "
        "[the JSON schema](plan-json.md) and [pictures](../how-to/draw-a-layout.md).")
    output = Option(parse.as_written, None, "FILE", PREVIEW,
        "Write the plan to this file.", unset="stdout", short="-o", details="A file is replaced "
        "atomically; an existing device or pipe is written to; `-` is stdout.")
    color_dim = Option(parse.as_written, None, "DIM", PREVIEW,
        "Dim whose index colors the ranks in a picture.", unset="the slowest dim",
        details="A name, or an index from 0.")
    rank = Option(parse.as_written, None, "WHICH", PREVIEW,
        "Show everything about one rank instead, such as `5` or `dp=1,tp=1`.",
        details="Prints text or JSON. See [all about one rank]"
        "(../how-to/place-ranks.md#inspect-one-rank).")
    all = Switch(PREVIEW,
        "Show every worker, even in a plan of more than 64 ranks.")

    submit = Option(parse.as_written, None, "SCHEDULER", SUBMIT,
        f"Submit this launch as a job to {either(_code(choices.JOB_SCHEDULERS))}, or run it on "
        "nodes of a `ray` cluster. With `--dry-run`, print the job instead.", family="",
        details="See [how to submit](../how-to/submit.md). No variable sets it, because the job "
        "would inherit that variable.",
        brief="Submit a job: slurm, kubernetes, ...",
        suggested=(*choices.JOB_SCHEDULERS, "ray"))
    submit_arg = Repeated(parse.one, "ARG", SUBMIT,
        "Option for the scheduler's own command, such as `--partition=gpu`. Repeatable.",
        details="One value may hold several: `'-p gpu -t 4:00:00'`. For Ray, [what each node needs]"
        "(../how-to/ray.md#resources): `CPU=16`.")
    submit_patch = Repeated(parse.one, "FILE", SUBMIT,
        "Change the manifests for Kubernetes by this strategic merge patch, in YAML. Repeatable.",
        details="See [how to change a manifest](../how-to/submit.md#change-a-manifest).")
    image = Option(parse.as_written, None, "NAME", SUBMIT,
        "Container image for Kubernetes, with torch, meshrun and the program; with Slurm, for "
        "pyxis.")

    show = Repeated(parse.one, "WHERE", OUTPUT,
        "Print only the output of these ranks, such as `dp=0`, `tp=1-3` or `rank=0,3`. "
        "Repeatable. Log files are not filtered.", unset="all",
        details="`dp=0,tp=1-3` means both; repeated, the option means any.",
        brief="Print only these ranks, such as `dp=0`")
    hide = Repeated(parse.one, "WHERE", OUTPUT,
        "Print the output of all ranks except these. Repeatable.")
    collapse = Switch(OUTPUT,
        "Print identical lines from several ranks once.",
        details="Each such line is labeled with the ranks and their number.")
    prefix = OneOf[choices.Prefix](get_args(choices.Prefix), OUTPUT,
        "What to print before each line: the rank's mesh coordinate, what torchrun prints, or "
        "nothing.", details="torchrun prints nothing, or `[default0]:` where "
        "output is teed. See [logs](logs.md#the-prefix-of-a-line).")
    no_prefix = Switch(OUTPUT,
        "Same as `--prefix none`.")
    console = OneOf[choices.ShownNodes](get_args(choices.ShownNodes), OUTPUT,
        "Which nodes print the output of their ranks.",
        details="Messages and errors are always printed. See [several nodes]"
        "(../how-to/several-nodes.md).")
    log_line_prefix_template = Option(parse.template, None, "TEXT", OUTPUT,
        "Template for the text before each line, with the fields `${rank}`, `${local_rank}`, "
        "`${role_name}`, `${hostname}`, `${coordinate}` and `${time}`.",
        unset=f"`{TEMPLATE_VARIABLE}`, else as `--prefix`", family=PET,
        details="See [logs](logs.md).")
    local_ranks_filter = Option(parse_local_ranks, None, "0,2", OUTPUT,
        "Print only the output of these local ranks.", unset="all", family=PET)
    status = Switch(OUTPUT,
        "Show the state, CPU and memory of each rank: in a panel on a terminal, or as periodic "
        "lines elsewhere.", details="See [how to watch a launch](../how-to/watch-a-launch.md).")
    status_interval = Option(parse_seconds, None, "TIME", OUTPUT,
        "How often to update the status.", unset="1 on a terminal, else 30")
    debug_rank = Option(parse.as_written, None, "WHICH", OUTPUT,
        "Give this rank the terminal for `breakpoint()`, such as `3` or `dp=0,tp=3`. The others "
        "wait.", details="No timeout applies meanwhile. See [how to debug one rank]"
        "(../how-to/debug-one-rank.md).")
    metrics = Option(parse.listen_address, None, "[HOST]:PORT", OUTPUT,
        "Serve metrics for Prometheus, and probes, on this port; without HOST, only on loopback.",
        details="The paths are `/metrics`, `/healthz` and `/readyz`. See [metrics and events]"
        "(../how-to/metrics.md).")
    events = Option(parse.as_written, None, "FILE", OUTPUT,
        "Append an event per line to this file as it happens, as JSON; `-` is stdout.",
        details="See [the schema](../how-to/metrics.md#events).")
    log_format = OneOf[choices.LogFormat](get_args(choices.LogFormat), OUTPUT,
        "Print lines as they are, or each as a JSON object.",
        details="Each object has the time, the rank and its stream. See "
        "[lines as JSON](../how-to/metrics.md#lines-as-json).")
    timings = Switch(OUTPUT,
        "Print at the end where the time went.")
    verbose = Switch(OUTPUT,
        "List listening ports at startup, with their addresses and purposes.", short="-v",
        details="See [security](../explanation/security.md).")

    max_restarts = Option(parse_integer, 0, "N", FAILURES,
        "Maximum number of restarts after failures.", family=PET,
        details="See [restarts](../how-to/restart.md). All ranks are restarted; there are fewer "
        "restarts if [the program makes no progress]"
        "(../how-to/restart.md#report-progress).",
        brief="Restarts after failures")
    check_first = Switch(FAILURES,
        "Check the mesh as `--check quick` does, and start the program only if nothing is wrong.",
        family="", details="A node that is to blame is left out if enough others remain. See "
        "[how to check a mesh](../how-to/check-a-mesh.md#check-before-a-launch).")
    check_gpus = Switch(FAILURES,
        "Check the health of the GPUs first, and start nothing on unhealthy "
        "ones.", details="Works with `--dry-run` too. See [health](../how-to/gpus.md#check-the-"
        "health-of-gpus).")
    gpu_memory_wait: Option[GpuMemoryWait | None] = Option(
        parse_gpu_memory_wait, None, "SIZE,TIME", FAILURES,
        "Wait before a restart until no GPU of the launch has more memory in use than this, such "
        "as `512MiB,50s`.", unset="no wait", details="See [memory after a failure]"
        "(../how-to/gpus.md#wait-for-memory-before-a-restart).")
    start_timeout = Option(parse_seconds, 300.0, "TIME", FAILURES,
        "Report where each rank is if startup takes longer than this. `0` disables the report.",
        details="The launch continues.")
    hang_timeout = Option(parse_seconds, 0.0, "TIME", FAILURES,
        "Stop or restart the ranks if none uses the CPU, prints anything or calls `heartbeat()` "
        "for this long. `0` disables the check.", details="See [how to find a hang]"
        "(../how-to/find-a-hang.md).")
    stragglers = Switch(FAILURES,
        "Report a rank that others wait for more than 10 % of the time.",
        details="See [how to find slow ranks](../how-to/find-slow-ranks.md).")
    straggler_time = Option(parse_seconds, 60.0, "TIME", FAILURES,
        "How long a rank may be late before `--stragglers` reports it.")
    node_timeout = Option(parse_seconds, 30.0, "TIME", FAILURES,
        "Stop or restart the ranks if another node is silent for this long.",
        details="See [when a node fails](../how-to/several-nodes.md#when-a-node-fails) and "
        "[elastic launches](../how-to/elastic.md). A node whose launcher ends is lost at once.")
    shutdown_timeout = Option(parse_seconds, 30.0, "TIME", FAILURES,
        "How long ranks may take to exit once told to stop, before SIGKILL.",
        unset=f"`{GRACE_VARIABLE}`, else 30", family=PET)
    forward: Option[Signals] = Option(parse_signals, ((), ()), "USR1,...", FAILURES,
        "Signals to forward to the ranks without ending the launch.",
        details="See [how to checkpoint](../how-to/checkpoint-when-preempted.md#another-signal).",
        suggested=("USR1", "USR2", "HUP"))
    signals_to_handle = Option(parse_signals, None, "A,B", FAILURES,
        "Signals that end the launch and are forwarded to the ranks.",
        unset=f"`{','.join(signum.name for signum in choices.STOP_SIGNALS)}`", family=PET,
        details="If given, this includes signals that were ignored when meshrun started. Unknown "
        "names are reported and ignored.")
    exit_code = OneOf[choices.ExitCodes](get_args(choices.ExitCodes), FAILURES,
        "Exit with the failed rank's own code, or (`torchrun`) with 1 for any failure.",
        details="See [exit codes](exit-codes.md).")
    node_history = Option(parse.as_written, None, "FILE", FAILURES,
        "Append failures of nodes to this file, and name nodes that fail often.",
        details="See [bad nodes](../how-to/leave-out-nodes.md).")
    max_node_failures = Option(parse_integer, None, "N", FAILURES,
        "Start no rank on a node with more failures in `--node-history` than this.",
        unset="no limit", details="Failures of the last 30 days count. The node is left out "
        "if enough others remain.")
    report = Option(parse.as_written, None, "FILE", FAILURES,
        "Write the result to this file as JSON.", details="See [the schema](report-json.md). The "
        "file is replaced atomically; `-` is stdout.")

    redirects = Option(parse_streams, NO_STREAMS, "STREAMS", LOGS,
        "Write streams to log files only: `1` stdout, `2` stderr, `3` both; or by local rank: "
        "`0-3:1,4:3`.", unset="0", short="-r", family=PET,
        suggested=("1", "2", "3"))
    tee = Option(parse_streams, NO_STREAMS, "STREAMS", LOGS,
        "Write streams to log files, and print them too.", unset="0", short="-t", family=PET,
        suggested=("1", "2", "3"))
    log_dir = Option(parse.as_written, None, "DIR", LOGS,
        "Directory for log files.", unset="a temporary directory", family=PET,
        details="See [logs](logs.md). `/dev/null` means no files.",
        brief="Where log files go")
    allow_shared_log_dir = Switch(LOGS,
        "Accept a `--log-dir` that other users can write to.",
        details="See [security](../explanation/security.md#files).")
    duplicate_stdout_filters: Option[Names] = Option(parse.names, (), "A,B", LOGS,
        "Copy teed lines of stdout that contain A or B to `filtered_stdout.log`.",
        family=PET, details="`,,` stands for a comma.")
    duplicate_stderr_filters: Option[Names] = Option(parse.names, (), "A,B", LOGS,
        "The same for stderr and `filtered_stderr.log`.", family=PET)
    logs_specs = Option(parse.as_written, None, "NAME", LOGS,
        "Plugin that chooses the log files: an entry point of `torchrun.logs_specs`.", family=PET)
    event_log_handler = Option(parse.as_written, "null", "NAME", LOGS,
        "Where torch elastic's events go: `null`, `console` or a plugin.", family=PET,
        details="A plugin is an entry point of `torchrun.event_log_handlers`: a `logging.Handler`, "
        "or a callable that returns one.",
        suggested=("null", "console"))

    standalone = Switch(RENDEZVOUS,
        "Run on this node alone, on a free port.", family=PET, details="Uses its own run id. The "
        "options below and the scheduler are ignored; `--nnodes` above 1 is an error.")
    rdzv_backend = Option(parse.as_written, STATIC, "NAME", RENDEZVOUS,
        f"How nodes find each other: {', '.join(_code(BACKENDS))} or a plugin.", family=PET,
        details="`static`: node 0 is the one at the endpoint. `c10d`: the same without "
        "`--node-rank`, and `--nnodes` may be a range. Others are torch's own rendezvous, which "
        "chooses the nodes and their order; a plugin is an entry point of `torchrun.handlers`.",
        suggested=tuple(BACKENDS))
    rdzv_endpoint = Option(parse.as_written, None, "HOST[:PORT]", RENDEZVOUS,
        "Address of the rendezvous, usually that of node 0.",
        unset="what the scheduler says", family=PET, details="A name, an IPv4 or an `[IPv6]` "
        f"address. The port is {DEFAULT_PORT}, for `c10d` {BACKENDS[C10D]}, for `etcd` "
        f"{BACKENDS['etcd']}. On one node the ranks' store listens there.")
    rdzv_id = Option(parse.short, None, "ID", RENDEZVOUS,
        "Name of this launch, the same on all nodes.", unset="the job's, else random", family=PET,
        details="It is `TORCHELASTIC_RUN_ID` and part of the log directory's name; launchers "
        "with another name are rejected.")
    rdzv_conf: Option[Settings] = Option(parse_rendezvous_settings, (), "K=V,...", RENDEZVOUS,
        "Rendezvous settings, such as `join_timeout=600`.", family=PET,
        details=f"{'; '.join(map(str, SETTINGS))}. Others go to the backend.")
    node_rank = Option(parse_integer, None, "N", RENDEZVOUS,
        "Rank of this node. Node 0 is the one at the endpoint.",
        unset="what the scheduler says, else by host name", family=PET)
    master_addr = Option(parse.as_written, None, "HOST", RENDEZVOUS,
        "Address of node 0, if there is no `--rdzv-endpoint`.", family=PET,
        details="On one node, with a port: where the ranks' store listens.")
    master_port = Option(parse.port, None, "PORT", RENDEZVOUS,
        "Port of node 0, if there is no `--rdzv-endpoint`.",
        unset=f"{DEFAULT_PORT} on several nodes, else a free one", family=PET,
        details=f"If {DEFAULT_PORT} is taken and no other node was given it, a free port is used.")
    local_addr = Option(parse.as_written, None, "HOST", RENDEZVOUS,
        "Address of this node.", unset="the one that faces the other nodes", family=PET,
        details="Node 0 listens there if it has no endpoint, or its name leads to no "
        "single address of it; on one node the ranks' store does if no port is given.")
    allow_different_programs = Switch(RENDEZVOUS,
        "Allow nodes to run different programs.",
        details="Nodes with different `--role` always may. Without it, different arguments of the "
        "program are only noted.")

    monitor_interval = Option(parse_seconds, None, "TIME", ACCEPTED,
        "meshrun waits for events and does not poll.", family=PET)
    exit_barrier_timeout = Option(parse_seconds, None, "TIME", ACCEPTED,
        "Finished ranks wait for the others, however long that takes.", family=PET)
    use_env = Switch(ACCEPTED,
        "For `torch.distributed.launch`; ranks always have `LOCAL_RANK`.", family="")

    print_completion = OneOf[str | None](choices.SHELLS, OTHER,
        f"Print a completion script for {either(_code(choices.SHELLS))}.", family="",
        default=None, metavar="SHELL")
    install_completion = Switch(OTHER,
        "Install completion for the shell that runs this: bash, zsh or fish.", family="",
        details="See [how to complete options](../how-to/complete-options.md).")
    report_bug = Switch(OTHER,
        "Print versions, machine, scheduler and plan for an issue, without secrets; start nothing.",
        family="", details="Put it before the options and the program of the launch. Read what it "
        "prints before you publish it: secrets are [masked by their names]"
        "(../explanation/security.md#secrets).")
    version = Switch(OTHER, "Print the version.", family="")
    help = Switch(OTHER,
        "Print all options, or those of a topic, such as `mesh`, or one option with its details. "
        "`-h` alone prints the common ones.",
        metavar="[TOPIC]", suggested=tuple(TOPICS), short="-h", family="")
    # fmt: on

    def given_for_launch(self) -> tuple[Option[Any], ...]:
        """Return the rows that were given and affect a launch, not only what is printed of it."""
        return tuple(
            row for row in self.rows() if self.source(row) and row.panel not in (PREVIEW, OTHER)
        )


HOST_OPTIONS = tuple(row for row in Options.rows() if row.panel == HOSTS)
"""Options that select hosts, or say how launchers are started there."""
CONTROLLER_OPTIONS = (
    *HOST_OPTIONS, Options.nnodes, Options.node_rank, Options.standalone, Options.submit,
    Options.submit_arg, Options.report,
)  # fmt: skip
"""Options that do not apply to the launcher of a host: they select hosts, or concern all nodes."""
KINDS_OF_PROGRAM = (Options.module, Options.no_python, Options.run_path)
"""Options that determine what kind of program is run."""


def forget_variables(rows: Iterable[Option[Any]]) -> None:
    """Unset the variables of options for what this process starts, and for options read later."""
    for row in rows:
        os.environ.pop(row.variable or "", None)
