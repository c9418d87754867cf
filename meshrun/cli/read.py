"""Options, the program's words and the environment -> LaunchRequest. Starts nothing."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from meshrun.cli.option import Option
from meshrun.cli.options import GRACE_VARIABLE, HOST_OPTIONS, TEMPLATE_VARIABLE, Options
from meshrun.cli.parsers import text_of_file, unknown_fields
from meshrun.cli.words import CommandLine
from meshrun.errors import SpecError, UsageError
from meshrun.host import rank_variables as var
from meshrun.host.folder import is_in_private
from meshrun.host.own_variables import SWITCHES
from meshrun.layout import parse_derived
from meshrun.layout.spec import MeshSpec, parse_mesh
from meshrun.plan.choices import STOP_SIGNALS, Prefix, StartMethod
from meshrun.plan.group_options import parse_group_options
from meshrun.plan.hostfile import choose_hosts, parse_hostfile, parse_hosts
from meshrun.plan.parse import parse_flag, parse_seconds, split_words, unknown_signal
from meshrun.plan.rank_program import BASE, PYTHON_EXEC, Program
from meshrun.plan.rendezvous_options import STATIC
from meshrun.plan.request import (
    ConsoleRequest,
    HostAccess,
    LaunchRequest,
    LogRequest,
    RemoteHosts,
    Rendezvous,
)
from meshrun.plan.scheduler_defaults import apply_hosts
from meshrun.wording import count

_DEBUG_TIMEOUT_S = 30 * 86400.0
"""How long collectives wait for a rank that is being debugged."""
_PYTHON = re.compile(r"(.*/)?python[\d.]*")
_DIM = re.compile(r"[A-Za-z_]\w*=(-?\d+|auto|\d+:\d*)")
_FOR_PEOPLE: tuple[Option[Any], ...] = (
    Options.collapse, Options.debug_rank, Options.status, Options.interactive,
)  # fmt: skip


def check_other_options(options: Options) -> None:
    """Check the options that are not part of the request, and all variables.

    Raises:
        UsageError: If one cannot be parsed, or is given without the option that it needs.
    """
    _require(options, Options.submit, Options.submit_arg, Options.submit_patch, Options.image)
    _ = options.monitor_interval, options.exit_barrier_timeout, options.format
    for row in options.rows():
        if options.in_variable(row):
            options.value(row)  # even if it is not used
    for name in SWITCHES:
        parse_flag(options.env.get(name, ""), name)


def _require(options: Options, needed: Option[Any], *rows: Option[Any]) -> None:
    """Raise an error if one of ``rows`` is typed without the option that it needs."""
    for row in rows:
        if options.is_typed(row) and options.value(needed) in (None, False):
            raise UsageError(f"{row.flag} requires {needed.flag}")


def read_program(options: Options) -> Program:
    """Return the program that the words after the options specify.

    Raises:
        UsageError: If there is none, or options contradict each other about its kind.
    """
    words = options.line.program
    if options.interactive and words[:1] in ((), ("-",)):
        from meshrun.worker.serve_calls import PROGRAM

        return Program(kind="module", target=PROGRAM)
    if not words:
        raise UsageError("no program given", hint=_hint_at_program(options.line))
    target, args = words[0], words[1:]
    if not target:
        raise UsageError(
            "expected a program, found an empty string",
            hint='check the variable that it comes from, as in `meshrun "$SCRIPT"`',
        )
    if not (options.module or options.no_python or os.path.lexists(target)):
        _check_target(options, target, args)
    if options.run_path:  # as in torchrun, it overrides --module and --no-python
        return Program(kind="script", target=target, args=args)
    if options.no_python:
        if options.module:
            raise UsageError("--no-python cannot be used with --module")
        return Program(kind="command", target=target, args=args)
    interpreter = options.env.get(PYTHON_EXEC)
    if interpreter and interpreter != sys.executable:
        flags = ("-u", "-m") if options.module else ("-u",)
        return Program(kind="command", target=interpreter, args=(*flags, target, *args))
    return Program(kind="module" if options.module else "script", target=target, args=args)


def _hint_at_program(line: CommandLine) -> str:
    """Return what may have become of the program."""
    option, value = (("", None), *line.options)[-1]
    if value is not None and value.endswith(".py"):
        return f"`{value}` was read as the value of {option}"
    return "for example: meshrun --mesh dp=2 train.py"


def _check_target(options: Options, target: str, args: tuple[str, ...]) -> None:
    """Raise an error if the target is no file but a common mistake."""
    if _PYTHON.fullmatch(target):
        rest = shlex.join(args) or "train.py"
        raise UsageError(
            f"expected a program, found the interpreter `{target}`",
            hint=f"leave it out: meshrun ... {rest}",
        )
    if _DIM.fullmatch(target):
        has_dims = options.mesh and not options.names
        meant = f"separate dims with commas: --mesh {options.mesh},{target}"
        raise UsageError(
            f"expected a program, found `{target}`",
            hint=meant if has_dims else f"a mesh follows its option: --mesh {target}",
        )
    if target.isdigit():
        raise UsageError(
            f"expected a program, found `{target}`",
            hint=f"use --nproc-per-node {target}" + "; -n means --dry-run" * options.dry_run,
        )


def build_request(options: Options, program: Program) -> LaunchRequest:
    """Return the requested launch, without its hosts.

    Raises:
        UsageError: If an option cannot be parsed, or two contradict each other.
    """
    grace = options.env.get(GRACE_VARIABLE)
    grace_s = parse_seconds(grace, GRACE_VARIABLE) if grace else Options.shutdown_timeout.default
    stop_signals, unknown = options.signals_to_handle or (STOP_SIGNALS, ())
    _need_mesh(options, Options.flatten, Options.view, Options.intra_node, Options.intra_domain)
    flattens, views = parse_derived(options.flatten, options.view)
    nnodes, least_nodes = _nodes(options)
    _check_combinations(options)
    request = LaunchRequest(
        program=program,
        mesh=_mesh(options),
        flattens=flattens,
        views=views,
        intra_node=options.intra_node,
        intra_domain=options.intra_domain,
        domain_size=options.domain_size,
        place=options.place,
        nnodes=nnodes,
        nproc_per_node=options.nproc_per_node,
        device=options.device or Options.device.default,
        gpus=options.gpus,
        groups=parse_group_options(options.backend, options.timeout, options.pg_opt),
        mesh_init=options.mesh_init,
        start_method=_start_method(options),
        shutdown_timeout_s=options.shutdown_timeout
        if options.text(Options.shutdown_timeout) is not None
        else grace_s,
        start_timeout_s=options.start_timeout,
        hang_timeout_s=options.hang_timeout,
        straggler_time_s=options.straggler_time if options.stragglers else None,
        preload=(*options.preload, *BASE),
        warm_idle_s=options.warm_idle
        if options.warm and var.GENERATION not in options.env
        else None,
        role=options.role,
        max_restarts=options.max_restarts,
        gpu_memory_wait=options.gpu_memory_wait,
        status=options.status,
        status_interval_s=options.status_interval,
        debug_rank=options.debug_rank,
        virtual_local_rank=options.virtual_local_rank,
        numa_binding=options.numa_binding,
        check_gpus=options.check_gpus,
        check_first=_check_first(options, program),
        nic_affinity=options.nic_affinity,
        stop_signals=stop_signals,
        forwarded_signals=_forwarded(options, stop_signals),
        stop_even_if_ignored=options.signals_to_handle is not None,
        exit_codes=options.exit_code,
        events=options.events,
        metrics=options.metrics,
        node_history=options.node_history,
        max_node_failures=options.max_node_failures,
        event_log_handler=options.event_log_handler or Options.event_log_handler.default,
        rendezvous=_rendezvous(options, least_nodes),
        access=_host_access(options),
        logs=LogRequest(
            log_dir=options.log_dir or None,  # as torchrun
            allow_shared=options.allow_shared_log_dir,
            redirects=options.redirects,
            tee=options.tee,
            stdout_filters=options.duplicate_stdout_filters,
            stderr_filters=options.duplicate_stderr_filters,
            logs_specs=options.logs_specs,
        ),
        console=ConsoleRequest(
            prefix=_prefix(options),
            template=_template(options),
            show=options.show,
            hide=options.hide,
            local_ranks=options.local_ranks_filter,
            collapse=options.collapse,
            nodes=options.console,
            verbose=options.verbose,
            is_json=options.log_format == "json",
        ),
        sources=_sources(options),
        notes=tuple(_notes(options, unknown)),
    )
    return request if options.debug_rank is None else _debugged(request)


def _check_combinations(options: Options) -> None:
    """Check that no option is given without one that it needs, or with one that excludes it."""
    _require(options, Options.node_history, Options.max_node_failures)
    _require(options, Options.stragglers, Options.straggler_time)
    _require(options, Options.warm, Options.warm_idle)
    _require(options, Options.status, Options.status_interval)
    if options.status and options.debug_rank is not None:
        raise UsageError("--status cannot be used with --debug-rank: both need the terminal")
    if options.place == "auto" and not (options.intra_node or options.intra_domain):
        raise UsageError(
            "--place auto requires --intra-node or --intra-domain",
            hint="for example: --intra-node tp",
        )
    for row in _FOR_PEOPLE:
        if options.log_format == "json" and options.value(row):
            raise UsageError(f"--log-format json cannot be used with {row.flag}")


def _debugged(request: LaunchRequest) -> LaunchRequest:
    """Return the request for ranks of which one is debugged: the others wait for the user."""
    groups = replace(request.groups, timeouts_s=(("", _DEBUG_TIMEOUT_S),))
    return replace(request, start_timeout_s=0.0, hang_timeout_s=0.0, max_restarts=0, groups=groups)


def read_rendezvous(options: Options) -> tuple[Rendezvous, int | None]:
    """Return the part of the request that says where nodes meet, and their number.

    Raises:
        UsageError: If one of its options cannot be parsed.
    """
    nnodes, least_nodes = _nodes(options)
    return _rendezvous(options, least_nodes), nnodes


def with_hosts(request: LaunchRequest, options: Options) -> LaunchRequest:
    """Return the request with the hosts of ``--hosts`` or ``--hostfile`` as its nodes, if given.

    Raises:
        UsageError: If the hosts cannot be parsed, or other options contradict them.
    """
    text, path = options.hosts, options.hostfile
    typed = [row for row in (Options.hosts, Options.hostfile) if options.is_typed(row)]
    if options.is_typed(Options.standalone) and not typed:
        return request
    if text is not None and path is not None:
        if len(typed) != 1:
            raise UsageError("--hosts cannot be used with --hostfile")
        text = text if Options.hosts in typed else None
    if text is not None:
        hosts = parse_hosts(text)
    elif path is not None:
        hosts = parse_hostfile(text_of_file(path, Options.hostfile.flag), path)
    else:
        return request
    from meshrun.ssh.host_session import check_distinct

    hosts = choose_hosts(hosts, include=options.include, exclude=options.exclude)
    check_distinct(hosts)
    return apply_hosts(request, RemoteHosts(hosts=hosts, access=request.access))


def check_hosts(request: LaunchRequest, options: Options) -> None:
    """Check the options about hosts, once the user or a scheduler may have named hosts.

    Raises:
        UsageError: If one is typed and there are no hosts, or if the command that starts
            launchers on hosts does not exist.
    """
    if request.remote is None:
        for row in HOST_OPTIONS:
            if options.is_typed(row) and (row is not Options.export or options.submit is None):
                others = ", --hostfile or --submit" if row is Options.export else " or --hostfile"
                raise UsageError(f"{row.flag} requires --hosts{others}")
        return
    from meshrun.ssh.remote_command import find_starter

    find_starter(request.remote)


def check_one_node(request: LaunchRequest, row: Option[Any]) -> None:
    """Check that a launch is on this machine alone, as ``row`` requires.

    Raises:
        UsageError: If it is not.
    """
    remote, nodes = request.remote, request.nnodes or 1
    if remote is None and nodes == 1:
        return
    found = count(len(remote.hosts), "host") if remote else count(nodes, "node")
    raise UsageError(
        f"{row.flag} launches only on this machine, found {found}",
        hint=f"remove {'--hosts or --hostfile' if remote else '--nnodes'}",
    )


def _host_access(options: Options) -> HostAccess:
    ssh = tuple(split_words(options.ssh or Options.ssh.default, "--ssh"))
    if not ssh:
        raise UsageError("--ssh is empty", hint="for example: --ssh 'ssh -F my_config'")
    return HostAccess(
        starter=options.launcher or "",
        ssh=ssh,
        connect_timeout_s=options.connect_timeout,
        export=options.export,
    )


def _sources(options: Options) -> tuple[tuple[str, str, str], ...]:
    """Return (flag, value, source) of each option that was given for the launch."""
    found = []
    for row in options.given_for_launch():
        value = options.values[row.name]
        if row is Options.report and is_in_private(value):  # of launch(), not the user's
            continue
        shown = " ".join(value) if row.repeats else str(value)
        found.append((row.flag, "" if value is True else shown, options.source(row)))
    return tuple(found)


def _notes(options: Options, unknown_signals: Sequence[str]) -> Iterator[str]:
    """Yield a note for each setting that is ignored, most of them as torchrun ignores them."""
    for name in unknown_signals:
        yield f"--signals-to-handle: {unknown_signal(name)}; ignoring it"
    if options.log_line_prefix_template is None:
        for why, _ in unknown_fields(options.env.get(TEMPLATE_VARIABLE, "")):
            yield f"{TEMPLATE_VARIABLE}: {why}"
    if options.warm and var.GENERATION in options.env:
        yield "--warm has no effect inside a rank: what a launch starts there ends with it"
    yield from options.unknown_variables()


def _mesh(options: Options) -> MeshSpec | None:
    text, names = options.mesh, options.names
    if text is None:
        if names is not None:
            raise UsageError(
                "--names requires --mesh", hint=f"for example: --mesh 2x4 --names {names}"
            )
        return None
    try:
        return parse_mesh(text, names)
    except SpecError as error:
        row = Options.names if error.text == names else Options.mesh
        error.option = row.flag
        error.message += options.in_variable(row)
        raise


def _check_first(options: Options, program: Program) -> tuple[str, ...]:
    if not options.check_first:
        return ()
    _need_mesh(options, Options.check_first)
    if program.kind == "command":
        raise UsageError(
            f"--check-first requires a Python program, found the command `{program.target}`",
            hint="run meshrun --check quick before the launch",
        )
    return ",".join(requirement.text for requirement in options.require), *options.check_path


def _need_mesh(options: Options, *rows: Option[Any]) -> None:
    for row in rows:
        if options.mesh is None and options.value(row):
            raise UsageError(f"{row.flag} requires --mesh", hint="for example: --mesh dp=2,tp=4")


def _forwarded(options: Options, stop_signals: tuple[int, ...]) -> tuple[int, ...]:
    signums, unknown = options.forward
    for name in unknown:
        raise UsageError(
            f"--forward: {unknown_signal(name)}", hint="use names such as USR1,SIGUSR2"
        )
    for signum in signums:
        if signum in stop_signals:
            name = signal.Signals(signum).name
            raise UsageError(
                f"--forward {name}: this signal ends the launch",
                hint=f"to forward it instead, set --signals-to-handle to signals without {name}",
            )
    return signums


def _nodes(options: Options) -> tuple[int | None, int | None]:
    """Return the maximum number of nodes, and the minimum if it is lower."""
    if options.nnodes is None:
        return None, None
    least, most = options.nnodes
    if not options.standalone:
        return most, least if least < most else None
    is_overridden = options.is_typed(Options.standalone) and not options.is_typed(Options.nnodes)
    if least > 1 and not is_overridden:
        found = f"--nnodes {options.text(Options.nnodes)}{options.in_variable(Options.nnodes)}"
        raise UsageError(
            f"--standalone{options.in_variable(Options.standalone)} runs on this node alone, but"
            f" {found} asks for more",
            hint="remove one of them",
        )
    return 1, None


def _rendezvous(options: Options, least_nodes: int | None) -> Rendezvous:
    backend = options.rdzv_backend or Options.rdzv_backend.default
    node_rank = options.node_rank  # an invalid one is always an error
    return Rendezvous(
        backend=backend,
        endpoint=options.rdzv_endpoint or "",
        run_id=None if options.standalone else options.rdzv_id,  # as torchrun
        conf=options.rdzv_conf,
        standalone=options.standalone,
        node_rank=node_rank if backend == STATIC else None,  # as torchrun
        least_nodes=least_nodes,
        compares_programs=not options.allow_different_programs,
        master_addr=options.master_addr,
        master_port=options.master_port,
        local_addr=options.local_addr,
        node_timeout_s=options.node_timeout,
        present=None,  # this and the rest are filled in once the scheduler is known
        coordinator=(),
        hosts=(),
        domain="",
        secret=None,
        join_command=None,
    )


def _prefix(options: Options) -> Prefix:
    """Return the prefix of lines; an option that was typed overrides a variable."""
    by_name, by_switch = options.is_typed(Options.prefix), options.is_typed(Options.no_prefix)
    if options.text(Options.prefix) is None or by_switch > by_name:
        return "none" if options.no_prefix else Options.prefix.default
    if by_switch:
        raise UsageError("--prefix cannot be used with --no-prefix")
    return options.prefix


def _template(options: Options) -> str | None:
    """Return the template of the prefix, unless a variable sets it and another prefix was typed."""
    is_other = _prefix(options) != "torchrun"  # torchrun's prefix uses the template for teed output
    is_typed = options.is_typed(Options.prefix) or options.is_typed(Options.no_prefix)
    if is_other and is_typed and not options.is_typed(Options.log_line_prefix_template):
        return None
    return options.log_line_prefix_template or options.env.get(TEMPLATE_VARIABLE)


def _start_method(options: Options) -> StartMethod | None:
    """Return the start method; torchrun's default ``spawn`` applies only with ``--run-path``."""
    name = options.start_method
    if name == "spawn":
        return "exec" if options.run_path else None
    return "fork" if name == "forkserver" else name
