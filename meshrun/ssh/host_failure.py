"""Why a host cannot be used, from the output of ssh and the remote shell. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from meshrun.errors import NO_COMMAND, NOT_EXECUTABLE, RendezvousError
from meshrun.host.printable import one_line
from meshrun.plan.hostfile import Host
from meshrun.protocol.result import signal_name
from meshrun.ssh.remote_command import NO_STDIN

_SSH = 255
"""ssh's exit code for errors of its own."""
_MOST_LINES = 8
_WITHOUT_PASSWORD = "`ssh {host} true` must work without a password; use a key or an agent"  # noqa: S105
_HINTS = (
    (
        "HOST IDENTIFICATION HAS CHANGED",
        "if you know why its key is new, remove the old one with `ssh-keygen -R`, then run"
        " `ssh {host}` and accept the new one",
    ),
    ("host key", "run `ssh {host}` once, and check and accept its host key"),
    ("Host key", "run `ssh {host}` once, and check and accept its host key"),
    ("Permission denied", _WITHOUT_PASSWORD),
    ("Could not resolve", "check the name; `ssh -G {host}` shows how ssh resolves it"),
    (
        "Connection refused",
        "check that sshd runs there and on which port; `ssh -G {host}` shows the settings",
    ),
    ("timed out", "check that the host is up and reachable; test with `ssh {host} true`"),
    ("No route", "check that the host is up and reachable; test with `ssh {host} true`"),
    (NO_STDIN, "let ssh pass on its stdin: use neither its option -n nor its setting StdinNull"),
)


class HostLost(RendezvousError):
    """A host was lost during the launch."""


class FirstLost(HostLost):
    """The first host of an elastic launch was lost; the launch may restart without it."""


class HostFailure(Struct, frozen=True):
    """Why a host cannot be used."""

    host: str
    why: str
    hint: str | None = None


def explain_end(
    host: Host, code: int, output: str, interpreter: str, *, starter: str = "ssh"
) -> HostFailure:
    """Return why there is no agent after ssh, or another starter, has exited.

    ``output`` is that of the starter, and of the shell and Python on the host. ``starter`` is ""
    if the agent was started on this machine, without one.
    """
    lines = _significant(output)
    if code in (NOT_EXECUTABLE, NO_COMMAND):
        return HostFailure(
            host.name,
            f"it cannot run {interpreter}{_quoted(lines[-1:])}",
            "the interpreter must have the same path on every host",
        )
    if missing := [line for line in lines if "No module named 'meshrun" in line]:
        return HostFailure(
            host.name,
            f"{interpreter} there has no meshrun{_quoted(missing)}",
            "install it there, or set PYTHONPATH to its location",
        )
    if code < 0:
        return HostFailure(
            host.name, f"{starter or 'its agent'} was killed by {signal_name(-code)}"
        )
    if code == _SSH and not lines:
        return HostFailure(
            host.name,
            f"{starter} failed without a message; the process it started may have been killed",
        )
    what = {0: "its agent exited", _SSH: f"{starter} failed"}.get(
        code, f"the process that {starter} started exited with code {code}"
    )
    general = "test with `ssh {host} true`" if code else ""  # otherwise, that works too
    hint = next((hint for word, hint in _HINTS if word in output), general)
    return HostFailure(
        host.name,
        what + _quoted(lines[-_MOST_LINES:]),
        hint.format(host=host.destination) or None if starter == "ssh" else None,
    )


def describe_silence(host: Host, timeout_s: float, output: str, *, starter: str) -> HostFailure:
    """Return the failure for a host that has not answered in time."""
    lines = _significant(output)[-_MOST_LINES:]
    hint = "--connect-timeout allows more time"
    if starter == "ssh":
        hint = f"test with `ssh {host.destination} true`; {hint}"
    if lines and lines[-1].endswith((":", "?")):
        hint = f"ssh asked for input: {_WITHOUT_PASSWORD.format(host=host.destination)}"
    return HostFailure(host.name, f"no answer within {timeout_s:g} s{_quoted(lines)}", hint)


def unusable_error(failures: Sequence[HostFailure], total: int, least: int) -> RendezvousError:
    """Return one error for all hosts that cannot be used, if ``least`` of ``total`` are needed."""
    first = failures[0]
    if len(failures) == 1 and least == total:
        return RendezvousError(f"host {first.host}: {first.why}", hint=first.hint)
    needed = "" if least == total else f", but {least} {'is' if least == 1 else 'are'} required"
    lines = [f"cannot use {len(failures)} of {total} hosts{needed}"]
    lines += [f"       {each.host}: {each.why}" for each in failures]
    return RendezvousError("\n".join(lines), hint=first.hint)


def lost_error(lost: Sequence[HostFailure], *, may_restart: bool) -> HostLost:
    """Return the error of a launch that lost hosts."""
    first = lost[0]
    others = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
    kind = FirstLost if may_restart else HostLost
    return kind(f"host {first.host} was lost: {first.why}{others}")


def _significant(output: str) -> list[str]:
    """Return the lines, sanitized, without decorations such as those around ssh's key warnings."""
    lines = (one_line(line.strip()) for line in output.splitlines())
    return [line for line in lines if line.strip("@ ")]


def _quoted(lines: Sequence[str]) -> str:
    return ": " + " / ".join(lines) if lines else ""
