"""What an option is: a typed row of a table, which parses its own value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

from meshrun.errors import UsageError

COMMAND_LINE = "command line"
"""The source of an option that was typed; the other sources are environment variables."""

_T = TypeVar("_T")


class Option(Generic[_T]):
    """A row of the table, and the descriptor that reads its value.

    The name of the attribute gives the flag and the variable: ``max_restarts`` of torchrun's family
    ``PET`` is ``--max-restarts`` and ``PET_MAX_RESTARTS``.
    """

    takes_value = True
    repeats = False

    def __init__(
        self,
        parse: Callable[[str, str], _T],
        default: _T,
        metavar: str,
        panel: str,
        help: str,  # noqa: A002 - as for typer and argparse
        *,
        details: str = "",
        brief: str = "",
        suggested: tuple[str, ...] = (),
        unset: str = "",
        short: str = "",
        family: str = "MESHRUN",
        in_launch: bool = False,
    ) -> None:
        """Describe an option.

        Args:
            parse: Makes a value of a text and the flag, which is named in its ``UsageError``.
            default: The value if the option is not given.
            metavar: What stands for the value in the help.
            panel: Heading under which the help and the reference list the option.
            help: One or two sentences, for the help, completion and the reference alike.
            details: Further Markdown, for the reference and the help of this option.
            brief: A few words, for the short help, which lists no option without them.
            suggested: Values that a shell completes, unless the metavar lists them.
            unset: What holds if the option is not given, where the default does not say it.
            short: A flag of one letter, such as ``-n``.
            family: ``MESHRUN``, ``PET`` for torchrun's own, or nothing if no variable is read.
            in_launch: Whether ``meshrun.launch()`` has a parameter of that name.
        """
        self.parse, self.default, self.metavar, self.panel = parse, default, metavar, panel
        self.help, self.details, self.brief, self.short = help, details, brief, short
        self.family, self.in_launch = family, in_launch
        listed = metavar.split("|") if metavar.islower() and "|" in metavar else ()
        self.suggested = suggested or tuple(listed)
        shown = f"{default:g}" if isinstance(default, int | float) else default
        self.unset = unset or (f"`{shown}`" if isinstance(shown, str) else "")

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.flag = f"--{name.replace('_', '-')}"
        self.variable = f"{self.family}_{name.upper()}" if self.family else None

    @overload
    def __get__(self, options: None, owner: type) -> Option[_T]: ...
    @overload
    def __get__(self, options: ParsedOptions, owner: type) -> _T: ...
    def __get__(self, options: ParsedOptions | None, owner: type) -> Option[_T] | _T:
        """Return the value; on the class itself the row.

        Raises:
            UsageError: If the text cannot be parsed, with the variable that holds it.
        """
        if options is None:
            return self
        given = options.values.get(self.name)
        with options.reading(self):
            return self.default if given is None else self.value(given)

    def value(self, given: Any) -> _T:
        """Return what a text means."""
        return self.parse(given, self.flag)

    @property
    def flags(self) -> tuple[str, ...]:
        """All names, the short one first."""
        return (self.short, self.flag) if self.short else (self.flag,)


class Switch(Option[bool]):
    """An option without a value."""

    takes_value = False

    def __init__(self, panel: str, help: str, *, metavar: str = "", **more: Any) -> None:  # noqa: A002
        super().__init__(lambda _text, _flag: True, False, metavar, panel, help, **more)
        self.unset = ""

    def value(self, given: Any) -> bool:
        """Return whether it is on."""
        return bool(given)


class Repeated(Option[tuple[str, ...]]):
    """An option that may be given several times."""

    repeats = True

    def __init__(
        self,
        parse: Callable[[str, str], tuple[str, ...]],
        metavar: str,
        panel: str,
        help: str,  # noqa: A002
        **more: Any,
    ) -> None:
        super().__init__(parse, (), metavar, panel, help, **more)

    def value(self, given: Any) -> tuple[str, ...]:
        """Return the values of all texts."""
        return tuple(value for text in given for value in self.parse(text, self.flag))


@dataclass(frozen=True, slots=True)
class ParsedOptions:
    """What the command line and the environment say; the base of a table of options."""

    values: Mapping[str, Any]
    """Options by name: a text, ``True``, a list of texts, or ``None``."""
    sources: Mapping[str, str]
    """Where each value came from: ``command line``, or a variable."""
    env: Mapping[str, str]

    @classmethod
    def rows(cls) -> tuple[Option[Any], ...]:
        """Return the options in the order of the table."""
        return tuple(
            row
            for table in reversed(cls.__mro__)
            for row in vars(table).values()
            if isinstance(row, Option)
        )

    def text(self, row: Option[Any]) -> str | None:
        """Return an option's text as it was given, or ``None``."""
        return self.values.get(row.name)

    def source(self, row: Option[Any]) -> str:
        """Return where an option was given, or nothing."""
        return self.sources.get(row.name, "")

    def is_typed(self, row: Option[Any]) -> bool:
        """Return whether an option stands on the command line."""
        return self.source(row) == COMMAND_LINE

    def in_variable(self, row: Option[Any]) -> str:
        """Return `` in PET_NAME`` for an option that a variable gives, else nothing."""
        source = self.source(row)
        return f" in {source}" if source.isupper() else ""

    @contextmanager
    def reading(self, row: Option[Any]) -> Iterator[None]:
        """Add the variable that holds the text to the error of whoever reads it."""
        try:
            yield
        except UsageError as error:
            error.message += self.in_variable(row)
            raise

    def behind(self, message: str) -> str:
        """Return `` (NAME=text)`` for options of a message that variables give, unless it says so.

        A message names an option, or else quotes its text.
        """
        given = [row for row in self.rows() if self.in_variable(row)]
        found = []
        for row in given:
            name = str(row.variable)
            texts = self.values[row.name] if row.repeats else (self.values[row.name],)
            is_quoted = "--" not in message and any(f"`{text}`" in message for text in texts)
            is_named = re.search(rf"(?<![\w-]){row.flag}(?![\w-])", message) is not None
            if (is_named or is_quoted) and name not in message:
                found.append(f"{name}={self.env.get(name, '')}")
        return f" ({', '.join(found)})" if found else ""

    def value(self, row: Option[_T]) -> _T:
        """Return the value of a row."""
        return row.__get__(self, type(self))
