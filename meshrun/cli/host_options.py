"""Options that say which hosts to launch on, and what they read."""

from __future__ import annotations

import shlex
from typing import Annotated

from meshrun.cli.option_kinds import HOSTS, own
from meshrun.cli.parsed_options import Asked
from meshrun.errors import UsageError
from meshrun.plan.hostfile import Host, choose_hosts, parse_hostfile, parse_hosts
from meshrun.plan.parse import parse_seconds
from meshrun.plan.request import LaunchRequest, Remote
from meshrun.plan.scheduler_defaults import fit_to_hosts

Hosts = Annotated[
    str | None,
    own(
        "--hosts",
        metavar="A,B:8,..",
        panel=HOSTS,
        text="Start a launcher on each of these hosts through ssh; A:8 has 8 workers.",
    ),
]
Hostfile = Annotated[
    str | None,
    own(
        "--hostfile",
        metavar="FILE",
        panel=HOSTS,
        text="The same, a host a line: host slots=8, as for DeepSpeed and Open MPI.",
    ),
]
Include = Annotated[
    str | None,
    own(
        "--include",
        metavar="A@B:0,2",
        panel=HOSTS,
        text="Of the hosts take only these, or only some slots of one.",
    ),
]
Exclude = Annotated[
    str | None,
    own("--exclude", metavar="A@B:0,2", panel=HOSTS, text="Take all hosts and slots but these."),
]
Export = Annotated[
    list[str] | None,
    own(
        "--export",
        metavar="NAME[,NAME]",
        panel=HOSTS,
        text="Variables that go to the hosts too, such as WANDB_API_KEY or 'HF_*'; repeatable.",
    ),
]
Ssh = Annotated[
    str | None,
    own("--ssh", metavar="COMMAND", panel=HOSTS, text="What to run as ssh: 'ssh -F my_config'."),
]
ConnectTimeout = Annotated[
    str | None,
    own(
        "--connect-timeout",
        metavar="TIME",
        panel=HOSTS,
        text="How long a host may take to answer; 10 if left out.",
    ),
]
_DEPENDENT = ("include", "exclude", "export", "ssh", "connect_timeout")


def on_hosts(request: LaunchRequest, asked: Asked) -> LaunchRequest:
    """Return the request with the hosts that were named as its nodes, if any were.

    Raises:
        UsageError: If the hosts cannot be read, or other options speak against them.
    """
    from meshrun.ssh.host_session import check_distinct

    text, path = asked.text("hosts"), asked.text("hostfile")
    if text is None and path is None:
        for name in _DEPENDENT:
            if asked.is_typed(name):
                option = name.replace("_", "-")
                raise UsageError(f"--{option} was given without hosts", hint="--hosts a,b")
        return request
    if text is not None and path is not None:
        typed = {name for name in ("hosts", "hostfile") if asked.is_typed(name)}
        if len(typed) != 1:
            raise UsageError("--hosts and --hostfile exclude each other", hint="give one of them")
        text, path = (text, None) if "hosts" in typed else (None, path)
    hosts = parse_hosts(text) if text is not None else _read_file(path or "")
    hosts = choose_hosts(hosts, include=asked.text("include"), exclude=asked.text("exclude"))
    check_distinct(hosts)
    given = asked.values.get("export") or ()
    remote = Remote(
        hosts=hosts,
        ssh=_words(asked.text("ssh") or "ssh"),
        connect_timeout_s=asked.read(
            "connect_timeout", lambda text: parse_seconds(text, "--connect-timeout"), 10.0
        ),
        export=tuple(
            name
            for each in given
            for name in each.replace(";", ",").replace(" ", ",").split(",")
            if name
        ),
    )
    return fit_to_hosts(request, remote)


def _read_file(path: str) -> tuple[Host, ...]:
    try:
        with open(path) as file:
            return parse_hostfile(file.read(), path)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"--hostfile {path}: {why}") from error


def _words(text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--ssh cannot be read as words: {error}", hint=f"`{text}`") from error
    if not words:
        raise UsageError("--ssh is empty", hint="--ssh 'ssh -F my_config'")
    return words
