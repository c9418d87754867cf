"""Options as texts, and where each came from -> LaunchRequest. Pure."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from string import Template
from typing import Any, TypeVar, cast

from meshrun.errors import UsageError
from meshrun.layout import Flatten, View, parse_derived
from meshrun.layout.spec import MeshSpec, parse_mesh
from meshrun.plan.device import check_device_type
from meshrun.plan.group_options import GroupOptions, parse_group_options
from meshrun.plan.numa import BINDING_MODES
from meshrun.plan.parse import (
    NO_STREAMS,
    no_signal,
    parse_choice,
    parse_integer,
    parse_least_nodes,
    parse_local_ranks,
    parse_names,
    parse_nnodes,
    parse_seconds,
    parse_settings,
    parse_signals,
    parse_streams,
    parse_workers,
)
from meshrun.plan.request import (
    STOP_SIGNALS,
    TEMPLATE_FIELDS,
    ConsoleRequest,
    LaunchRequest,
    LogRequest,
    Program,
    Rendezvous,
    StartMethod,
)

COMMAND_LINE = "command line"
"""The source of an option that was typed; others are variables."""
_PRELOAD = ("torch", "torch.distributed.device_mesh")
_LONGEST_NAME = 1024
_GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_TEMPLATE_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
_TIMES = frozenset(
    {"timeout", "keep_alive_interval"}
    | {f"{what}_timeout" for what in ("join", "last_call", "close", "read", "heartbeat")}
)
"""Settings of torch's rendezvous that are times."""
_Value = TypeVar("_Value")
_Number = TypeVar("_Number", int, float)
_DEADLINE_S = 30 * 86400.0
"""How long collectives wait for a rank that is being debugged."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line and the environment say."""

    values: Mapping[str, Any]
    """Options by the names of their parameters; a text, ``True``, a list, or ``None``."""
    sources: Mapping[str, str]
    """Where each value that was given came from: ``command line``, or a variable."""
    env: Mapping[str, str]

    def text(self, name: str) -> str | None:
        """Return an option's text, or ``None`` if it was not given."""
        value = self.values.get(name)
        return None if value is None else str(value)

    def flag(self, name: str) -> bool:
        """Return whether a switch is on."""
        return bool(self.values.get(name))

    def place(self, name: str) -> str:
        """Return `` in PET_NAME`` for an option that a variable gave, else nothing."""
        source = self.sources.get(name, "")
        return f" in {source}" if source.isupper() else ""

    def is_typed(self, name: str) -> bool:
        """Return whether an option stands on the command line."""
        return self.sources.get(name) == COMMAND_LINE

    def read(self, name: str, parse: Callable[[str], _Value], default: _Value) -> _Value:
        """Return an option's value, or ``default`` if it was not given.

        Raises:
            UsageError: As ``parse`` raises it, with the variable that holds the text.
        """
        text = self.text(name)
        if text is None:
            return default
        try:
            return parse(text)
        except UsageError as error:
            error.message += self.place(name)
            raise

    def given(self) -> tuple[tuple[str, str, str], ...]:
        """Return (option, value, source) of what was given, in the order of the options."""
        rows = []
        for name, value in self.values.items():
            if source := self.sources.get(name):
                shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
                text = "" if value is True else shown
                rows.append((f"--{name.replace('_', '-')}", text, source))
        return tuple(rows)


def build_request(asked: Asked, program: Program) -> LaunchRequest:
    """Return the launch that was asked for.

    Raises:
        UsageError: If an option cannot be read, or two do not go together.
    """
    grace = asked.env.get(_GRACE_VARIABLE)
    default_s = parse_seconds(grace, _GRACE_VARIABLE) if grace else 30.0
    stop_signals, unknown = _signals(asked, "signals_to_handle", STOP_SIGNALS)
    flattens, views = _derived(asked)
    nnodes, least_nodes = _nodes(asked)
    return LaunchRequest(
        program=program,
        mesh=_mesh(asked),
        flattens=flattens,
        views=views,
        intra_node=_intra_node(asked),
        renumber=_renumber(asked),
        nnodes=nnodes,
        nproc_per_node=asked.read("nproc_per_node", parse_workers, None),
        device=asked.read("device", check_device_type, "auto") or "auto",
        groups=_groups(asked),
        mesh_init=asked.read("mesh_init", _choice("--mesh-init", ("eager", "lazy")), "eager"),
        start_method=_start_method(asked),
        shutdown_timeout_s=asked.read(
            "shutdown_timeout", _seconds("--shutdown-timeout"), default_s
        ),
        start_timeout_s=_unless_debugged(
            asked, asked.read("start_timeout", _seconds("--start-timeout"), 300.0)
        ),
        hang_timeout_s=_unless_debugged(
            asked, asked.read("hang_timeout", _seconds("--hang-timeout"), 0.0)
        ),
        node_timeout_s=asked.read("node_timeout", _seconds("--node-timeout"), 30.0),
        preload=(*_PRELOAD, *(asked.values.get("preload") or ())),
        role=asked.read("role", _short("--role"), "") or "default",
        max_restarts=_unless_debugged(
            asked, asked.read("max_restarts", _integer("--max-restarts"), 0)
        ),
        status=asked.flag("status"),
        status_interval_s=_status_interval(asked),
        debug_rank=asked.text("debug_rank"),
        virtual_local_rank=asked.flag("virtual_local_rank"),
        numa_binding=asked.read("numa_binding", _choice("--numa-binding", BINDING_MODES), None),
        stop_signals=stop_signals,
        forwarded_signals=_forwarded(asked, stop_signals),
        stop_even_if_ignored=asked.text("signals_to_handle") is not None,
        exit_codes=asked.read(
            "exit_code", _choice("--exit-code", ("worker", "torchrun")), "worker"
        ),
        event_log_handler=asked.text("event_log_handler") or "null",
        rendezvous=_rendezvous(asked, least_nodes),
        logs=_logs(asked),
        console=_console(asked),
        sources=asked.given(),
        told=tuple(_told(asked, unknown)),
    )


def _told(asked: Asked, unknown_signals: Sequence[str]) -> Iterator[str]:
    """What does not count, as torchrun passes over it too, for people."""
    for name in unknown_signals:
        yield f"--signals-to-handle: {no_signal(name)}; it is left out"
    if asked.text("log_line_prefix_template") is None:
        for why, _ in _doubts(asked.env.get(_TEMPLATE_VARIABLE, "")):
            yield f"{_TEMPLATE_VARIABLE}: {why}"


def _template(text: str) -> str:
    for why, hint in _doubts(text):
        raise UsageError(f"--log-line-prefix-template: {why}", hint=hint)
    return text


def _doubts(template: str) -> Iterator[tuple[str, str]]:
    """Yield each field of a template that nothing is filled in for, with those there are."""
    for found in Template.pattern.finditer(template):
        name = found["named"] or found["braced"]
        if name and name not in TEMPLATE_FIELDS:
            near = get_close_matches(name, TEMPLATE_FIELDS, n=1)
            fields = ", ".join(f"${{{field}}}" for field in TEMPLATE_FIELDS)
            hint = f"`${{{near[0]}}}`?" if near else f"there are {fields}; $$ is a dollar sign"
            yield f"there is nothing to fill in for `{found[0]}`", hint


def build_meeting_request(asked: Asked) -> LaunchRequest:
    """Return no more of the launch that was asked for than where its nodes meet.

    Raises:
        UsageError: If that cannot be read.
    """
    nnodes, least_nodes = _nodes(asked)
    return LaunchRequest(
        program=Program(kind="script", target=""),
        nnodes=nnodes,
        node_timeout_s=asked.read("node_timeout", _seconds("--node-timeout"), 30.0),
        rendezvous=_rendezvous(asked, least_nodes),
    )


def check_accepted(asked: Asked) -> None:
    """Read the options that are accepted for torchrun's sake, and those that need another.

    Raises:
        UsageError: If one cannot be read, or stands alone.
    """
    for name in ("submit_arg", "image"):
        if asked.text("submit") is None and asked.is_typed(name):
            raise UsageError(f"--{name.replace('_', '-')} was given without --submit")
    for name in ("monitor_interval", "exit_barrier_timeout"):
        asked.read(name, _seconds(f"--{name.replace('_', '-')}"), 0.0)


def _mesh(asked: Asked) -> MeshSpec | None:
    names = asked.text("names")
    if asked.text("mesh") is None:
        if names is not None:
            raise UsageError("--names was given without --mesh", hint=f"--mesh 2x4 --names {names}")
        return None
    return asked.read("mesh", lambda text: parse_mesh(text, names), None)


def _derived(asked: Asked) -> tuple[tuple[Flatten, ...], tuple[View, ...]]:
    texts = _list(asked, "flatten"), _list(asked, "view")
    if asked.text("mesh") is None and any(texts):
        option = "--flatten" if texts[0] else "--view"
        raise UsageError(f"{option} was given without --mesh", hint="--mesh dp=2,tp=4 or another")
    return parse_derived(*texts)


def _forwarded(asked: Asked, stop_signals: tuple[int, ...]) -> tuple[int, ...]:
    signums, unknown = _signals(asked, "forward", ())
    for name in unknown:
        raise UsageError(f"--forward: {no_signal(name)}", hint="names such as USR1,SIGUSR2")
    for signum in signums:
        if signum in stop_signals:
            name = signal.Signals(signum).name
            raise UsageError(
                f"--forward {name}: this signal ends the launch",
                hint=f"--signals-to-handle without {name} gives it free",
            )
    return signums


def _unless_debugged(asked: Asked, value: _Number) -> _Number:
    """Nobody who waits for a person at a debugger is late."""
    return value if asked.text("debug_rank") is None else type(value)(0)


def _status_interval(asked: Asked) -> float | None:
    if asked.flag("status") and asked.text("debug_rank") is not None:
        raise UsageError("--status and --debug-rank both want the terminal")
    interval_s = asked.read("status_interval", _seconds("--status-interval"), None)
    if interval_s is not None and not asked.flag("status"):
        raise UsageError("--status-interval was given without --status")
    return interval_s


def _groups(asked: Asked) -> GroupOptions:
    groups = parse_group_options(
        _list(asked, "backend"), _list(asked, "timeout"), _list(asked, "pg_opt")
    )
    if asked.text("debug_rank") is None:
        return groups
    return replace(groups, timeouts_s=(("", _DEADLINE_S),))


def _intra_node(asked: Asked) -> tuple[str, ...]:
    texts = _list(asked, "intra_node")
    if texts and asked.text("mesh") is None:
        raise UsageError("--intra-node was given without --mesh", hint="--mesh dp=2,tp=4 or such")
    dims = (dim.strip() for text in texts for dim in text.split(","))
    return tuple(dict.fromkeys(dim for dim in dims if dim))


def _renumber(asked: Asked) -> bool:
    how = asked.read("place", _choice("--place", ("contiguous", "auto")), "contiguous")
    if how == "auto" and not _intra_node(asked):
        raise UsageError(
            "--place auto was given without --intra-node",
            hint="--intra-node tp says what the ranks are to be renumbered for",
        )
    return bool(how == "auto")


def _list(asked: Asked, name: str) -> tuple[str, ...]:
    """Return what a repeatable option was given; in a variable ``;`` stands between."""
    given = asked.values.get(name) or ()
    return tuple(part.strip() for text in given for part in text.split(";") if part.strip())


def _nodes(asked: Asked) -> tuple[int | None, int | None]:
    """Return how many nodes there may be, and how many are enough if those are fewer.

    Raises:
        UsageError: If one node alone and several are asked for.
    """
    most = asked.read("nnodes", parse_nnodes, None)
    least = asked.read("nnodes", parse_least_nodes, None)
    if most is None or not asked.flag("standalone"):
        return most, least
    is_passed_over = asked.is_typed("standalone") and not asked.is_typed("nnodes")
    if (least or most) > 1 and not is_passed_over:
        raise UsageError(
            f"--standalone{asked.place('standalone')} means this node alone, and --nnodes"
            f" {asked.text('nnodes')}{asked.place('nnodes')} asks for more",
            hint="leave one of them out",
        )
    return 1, None


def _rendezvous(asked: Asked, least_nodes: int | None) -> Rendezvous:
    standalone = asked.flag("standalone")
    return Rendezvous(
        backend=asked.text("rdzv_backend") or "static",
        endpoint=asked.text("rdzv_endpoint") or "",
        run_id=None
        if standalone
        else asked.read("rdzv_id", _short("--rdzv-id"), None),  # as torchrun
        conf=asked.read("rdzv_conf", _conf, ()),
        standalone=standalone,
        node_rank=asked.read("node_rank", _integer("--node-rank"), None),
        least_nodes=least_nodes,
        compares_programs=not asked.flag("allow_different_programs"),
        master_addr=asked.text("master_addr"),
        master_port=asked.read("master_port", _integer("--master-port", most=65535), None),
        local_addr=asked.text("local_addr"),
    )


def _conf(text: str) -> tuple[tuple[str, str], ...]:
    """Return the settings of a rendezvous, its times in the whole seconds that torch reads."""
    return tuple(
        (key, value if key not in _TIMES or value.isdigit() else _whole_seconds(key, value))
        for key, value in parse_settings(text, "--rdzv-conf")
    )


def _whole_seconds(key: str, value: str) -> str:
    return str(math.ceil(parse_seconds(value, f"--rdzv-conf {key}")))


def _logs(asked: Asked) -> LogRequest:
    return LogRequest(
        log_dir=asked.text("log_dir"),
        is_shared=asked.flag("allow_shared_log_dir"),
        redirects=asked.read(
            "redirects", lambda text: parse_streams(text, "--redirects"), NO_STREAMS
        ),
        tee=asked.read("tee", lambda text: parse_streams(text, "--tee"), NO_STREAMS),
        stdout_filters=asked.read("duplicate_stdout_filters", parse_names, ()),
        stderr_filters=asked.read("duplicate_stderr_filters", parse_names, ()),
        logs_specs=asked.text("logs_specs"),
    )


def _prefix(asked: Asked) -> Any:
    """Return what stands before lines; of two ways to say it the one that was typed counts.

    Raises:
        UsageError: If both were typed.
    """
    if asked.text("prefix") is None or (asked.is_typed("no_prefix") > asked.is_typed("prefix")):
        return "none" if asked.flag("no_prefix") else "mesh"
    if asked.is_typed("no_prefix"):
        raise UsageError("--prefix and --no-prefix exclude each other", hint="give one of them")
    return asked.read("prefix", _choice("--prefix", ("mesh", "torchrun", "none")), None)


def _console(asked: Asked) -> ConsoleRequest:
    return ConsoleRequest(
        prefix=_prefix(asked),
        template=asked.read("log_line_prefix_template", _template, None)
        or asked.env.get(_TEMPLATE_VARIABLE),
        show=tuple(asked.values.get("show") or ()),
        hide=tuple(asked.values.get("hide") or ()),
        local_ranks=asked.read(
            "local_ranks_filter",
            lambda text: parse_local_ranks(text, "--local-ranks-filter"),
            None,
        ),
        collapse=asked.flag("collapse"),
        nodes=asked.read("console", _choice("--console", ("all", "first-node")), "all"),
        verbose=asked.flag("verbose"),
    )


def _start_method(asked: Asked) -> StartMethod | None:
    """torchrun's ``spawn`` is its default, and says nothing of programs that are not functions."""
    choices = ("fork", "exec", "forkserver", "spawn")
    name = asked.read("start_method", _choice("--start-method", choices), None)
    if name == "spawn":
        return "exec" if asked.flag("run_path") else None
    return "fork" if name == "forkserver" else name


def _integer(what: str, *, least: int = 0, most: int | None = None) -> Callable[[str], Any]:
    return lambda text: parse_integer(text, what, least=least, most=most)


def _short(what: str) -> Callable[[str], Any]:
    """Read a name, which each rank has in several variables and some file systems in a path."""

    def read(text: str) -> str:
        if len(text) > _LONGEST_NAME:
            raise UsageError(
                f"{what} is a name of at most {_LONGEST_NAME} characters, found {len(text)}",
                hint="a file can hold more: pass its path to the program",
            )
        return text

    return read


def _seconds(what: str) -> Callable[[str], float]:
    return lambda text: parse_seconds(text, what)


def _signals(
    asked: Asked, name: str, default: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the signals of an option, and the names of which there is none."""
    option = f"--{name.replace('_', '-')}"
    nothing: tuple[str, ...] = ()
    return asked.read(name, lambda text: parse_signals(text, option), (default, nothing))


def _choice(what: str, choices: tuple[str, ...]) -> Callable[[str], Any]:
    return lambda text: cast(Any, parse_choice(text, what, choices))
