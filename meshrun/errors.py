"""The errors that meshrun raises, and all exit codes; report/ prints the errors.

A class has the exit code of its errors; the numbers at the top belong to no class.
"""

from __future__ import annotations

PREEMPTED = 75
"""The exit code of a preempted launch: TEMPFAIL of sysexits, "try again"."""
NOT_EXECUTABLE, NO_COMMAND = 126, 127
"""The exit codes for a command that cannot be executed, and for one not found, as in a shell."""


class MeshrunError(Exception):
    """Base class of all errors that meshrun raises.

    Args:
        message: What was requested and what was found, with the numbers; lower case, no full stop.
        hint: What to try, or ``None`` when there is nothing better than the message.
        exit_code: The exit code, if it is not that of the class.
        is_reported_elsewhere: Whether another process of the same job reports this error.
    """

    exit_code = 1
    is_reported_elsewhere = False

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        exit_code: int | None = None,
        is_reported_elsewhere: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if exit_code is not None:
            self.exit_code = exit_code
        if is_reported_elsewhere:
            self.is_reported_elsewhere = True

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        """Copy an error without its ``__init__``, which may take other arguments than ``args``."""
        return Exception.__new__, (type(self), *self.args), self.__dict__

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows instead of meshrun's own frames."""
        return f"error: {self}".splitlines()


class UsageError(MeshrunError):
    """The request is invalid; nothing was started."""

    exit_code = 2


class SpecError(UsageError):
    """A spec could not be parsed.

    Args:
        text: The whole text as the user wrote it.
        position: Index in ``text`` of the first wrong character.
        wrong: The wrong part of ``text``; "" for one character or its end.
        option: The option that ``text`` is the value of, if any.
    """

    def __init__(
        self,
        message: str,
        text: str,
        position: int,
        wrong: str = "",
        *,
        hint: str | None = None,
        option: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.option = option
        self.text = text
        self.position = position
        self.length = max(1, len(wrong))

    def __str__(self) -> str:
        parts = [self.message, self.marked]
        return "\n".join([*parts, f"hint: {self.hint}"] if self.hint else parts)

    @property
    def marked(self) -> str:
        """``text`` after its option, with carets under the wrong part."""
        lead = f"    {self.option} " if self.option else "    "
        return f"{lead}{self.text}\n{' ' * (len(lead) + self.position)}{'^' * self.length}"


class LayoutError(UsageError):
    """The mesh and the machines do not fit together."""


class ProgramError(UsageError):
    """The program to run cannot be opened; ``exit_code`` is what ``python`` would return."""


class MeshError(MeshrunError, RuntimeError):
    """This process has no mesh, or its mesh is no longer valid."""


class HostError(MeshrunError):
    """This machine lacks something the launch needs (71, sysexits OSERR)."""

    exit_code = 71


class HangError(MeshrunError):
    """The ranks run but make no progress (124, as timeout(1))."""

    exit_code = 124


class RendezvousError(MeshrunError):
    """Nodes could not join, or lost each other (69, sysexits UNAVAILABLE)."""

    exit_code = 69


class NodeLostError(RendezvousError):
    """Another node exited or stopped responding."""


class NodeExcludedError(MeshrunError):
    """A rank reported that its node must not be used (78): do not restart with the same nodes."""

    exit_code = 78


class CheckError(MeshrunError):
    """``--check-first`` found a problem (1, as for ``--check``)."""


class InternalError(MeshrunError):
    """A bug in meshrun (70, sysexits SOFTWARE)."""

    exit_code = 70


def exit_code_of(signum: int | None, code: int | None = None) -> int:
    """Return the exit code of what a signal ended, as in a shell, or else exited with ``code``."""
    return (code or 0) if signum is None else 128 + signum


def signal_of_code(code: int) -> int:
    """Return the signal that an exit code means, 0 or less for none."""
    return code - 128


_KINDS: dict[str, type[MeshrunError]] = {
    name: kind
    for name, kind in globals().items()
    if isinstance(kind, type) and issubclass(kind, MeshrunError) and kind is not SpecError
}
"""The classes above that take a message and no other text."""


def kind_of(error: MeshrunError) -> str:
    """Return the name of an error's class for :func:`error_class`, or of the nearest base."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS)


def error_class(kind: str) -> type[MeshrunError]:
    """Return the class of an error from another launcher, by its name."""
    return _KINDS.get(kind, MeshrunError)
