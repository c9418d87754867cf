"""An option: a typed row of the table, which parses its own value; and what was given of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar, overload

from meshrun.cli.words import CommandLine, nearest
from meshrun.errors import UsageError
from meshrun.host import rank_variables as var
from meshrun.host.own_variables import BETWEEN_LAUNCHERS, USER_VARIABLES
from meshrun.plan.parse import parse_choice
from meshrun.wording import flag_of

PET = "PET"
"""Prefix of the variables of torchrun's own options."""
COMMAND_LINE = "command line"
"""The source of an option that was typed; any other source is an environment variable."""

_PET_CUTOFF = 0.8
"""How similar to an option a ``PET_`` name must be: other programs use that prefix, too."""
_SERVICE = "_SERVICE_HOST"
_T = TypeVar("_T")


@dataclass(eq=False, repr=False)
class Option(Generic[_T]):
    """A row of the table, and the descriptor that reads its value.

    The attribute's name determines the flag and the variable: ``max_restarts`` of torchrun's family
    ``PET`` is ``--max-restarts`` and ``PET_MAX_RESTARTS``.
    """

    takes_value: ClassVar[bool] = True
    repeats: ClassVar[bool] = False

    parse: Callable[[Any, str], _T]
    """Converts what was given: a text, a list of texts if the option repeats, or a switch's value.

    It also takes the flag, which its ``UsageError`` names.
    """
    default: _T
    metavar: str
    """Placeholder for the value in the help."""
    panel: str
    """Heading under which the help and the reference list the option."""
    help: str
    """One or two sentences for the help, the completion and the reference."""
    _: KW_ONLY
    details: str = ""
    """Further Markdown for the reference and the help of this option."""
    brief: str = ""
    """A few words for the short help, which omits options without them."""
    suggested: tuple[str, ...] = ()
    """Values that a shell completes."""
    unset: str = ""
    """What applies if the option is not given; by default ``default``."""
    short: str = ""
    """A flag of one letter, such as ``-n``."""
    family: str = "MESHRUN"
    """``MESHRUN``, ``PET`` for torchrun's own, or nothing to read no variable."""

    def __post_init__(self) -> None:
        default = self.default
        shown = f"{default:g}" if isinstance(default, int | float) else default
        self.unset = self.unset or (f"`{shown}`" if isinstance(shown, str) else "")

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.flag = flag_of(name)
        self.variable = f"{self.family}_{name.upper()}" if self.family else None

    @overload
    def __get__(self, options: None, owner: type) -> Option[_T]: ...
    @overload
    def __get__(self, options: ParsedOptions, owner: type) -> _T: ...
    def __get__(self, options: ParsedOptions | None, owner: type) -> Option[_T] | _T:
        """Return the value; on the class itself the row.

        Raises:
            UsageError: If the text cannot be parsed; names the variable that holds it, if any.
        """
        if options is None:
            return self
        given = options.values.get(self.name)
        try:
            return self.default if given is None else self.parse(given, self.flag)
        except UsageError as error:
            error.message += options.in_variable(self)
            raise

    @property
    def flags(self) -> tuple[str, ...]:
        """All flags, the short one first."""
        return (self.short, self.flag) if self.short else (self.flag,)


class OneOf(Option[_T]):
    """An option with a few values, by default the first."""

    def __init__(self, choices: tuple[Any, ...], panel: str, help: str, **more: Any) -> None:  # noqa: A002
        parse: Any = partial(parse_choice, choices=choices)
        more = {"metavar": "|".join(choices), "suggested": choices, "default": choices[0], **more}
        super().__init__(parse, panel=panel, help=help, **more)


class Switch(Option[bool]):
    """An option without a value."""

    takes_value = False

    def __init__(self, panel: str, help: str, *, metavar: str = "", **more: Any) -> None:  # noqa: A002
        super().__init__(lambda given, _flag: bool(given), False, metavar, panel, help, **more)
        self.unset = ""


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
        def parse_all(texts: Sequence[str], flag: str) -> tuple[str, ...]:
            return tuple(value for text in texts for value in parse(text, flag))

        super().__init__(parse_all, (), metavar, panel, help, **more)


@dataclass(frozen=True, slots=True)
class ParsedOptions:
    """Options as given on the command line and in the environment; the base of the table."""

    values: Mapping[str, Any]
    """What was given, by name: a text, a list of texts, or whether a switch is on."""
    sources: Mapping[str, str]
    """The source of each value: ``command line``, or a variable."""
    env: Mapping[str, str]
    line: CommandLine = CommandLine()  # noqa: RUF009 - frozen

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
        """Return the source of an option's value, or nothing if it was not given."""
        return self.sources.get(row.name, "")

    def is_typed(self, row: Option[Any]) -> bool:
        """Return whether an option is on the command line."""
        return self.source(row) == COMMAND_LINE

    def in_variable(self, row: Option[Any]) -> str:
        """Return `` in PET_NAME`` for an option that a variable sets, else nothing."""
        source = self.source(row)
        return f" in {source}" if source.isupper() else ""

    def variables_behind(self, message: str) -> str:
        """Return `` (NAME=text)`` for variables that set an option to which a message refers.

        A message refers to an option by its flag or, if it contains no flag, by quoting its text.
        Variables that it names already are left out.
        """
        found = []
        for row in self.rows():
            name = str(row.variable)
            if not self.in_variable(row) or name in message:
                continue
            texts = self.values[row.name] if row.repeats else [str(self.values[row.name])]
            is_quoted = "--" not in message and any(f"`{text}`" in message for text in texts)
            is_named = re.search(rf"(?<![\w-]){row.flag}(?![\w-])", message) is not None
            if is_named or is_quoted:
                found.append(f"{name}={' '.join(texts)}")
        return f" ({', '.join(found)})" if found else ""

    def value(self, row: Option[_T]) -> _T:
        """Return the value of a row."""
        return row.__get__(self, type(self))

    def unknown_variables(self) -> Iterator[str]:
        """Yield a note for each variable that looks like one of meshrun's but is unknown.

        A launch inside a rank yields none, as the outer launch has reported them.
        """
        if var.GENERATION in self.env:
            return
        rows = self.rows()
        known = {*(row.variable for row in rows), *USER_VARIABLES, *BETWEEN_LAUNCHERS}
        unknown = sorted(
            name for name in self.env if name.startswith(("MESHRUN_", "PET_")) and name not in known
        )
        if not unknown:
            return
        # Kubernetes sets some in each pod for a service, such as one named meshrun.
        services = [name.removesuffix(_SERVICE) for name in unknown if name.endswith(_SERVICE)]
        starts = tuple(f"{service}_{end}" for service in services for end in ("SERVICE_", "PORT"))
        for name in unknown:
            suggestion = _suggestion(name, rows)
            if not name.startswith(starts) and (suggestion or not name.startswith(PET)):
                yield f"unknown environment variable {name}{suggestion}"


def _suggestion(name: str, rows: Sequence[Option[object]]) -> str:
    """Return what to set or to type instead, if anything is similar."""
    family, _, rest = name.partition("_")
    if family == PET:
        instead = {row.flag: row.variable for row in rows if row.variable}
    else:
        instead = {row.flag: row.variable or row.flag for row in rows}
        instead |= {flag_of(other.partition("_")[2]): other for other in USER_VARIABLES}
    near = nearest(flag_of(rest), instead, most=1, cutoff=_PET_CUTOFF if family == PET else 0.7)
    if not near:
        return ""
    if instead[near[0]] == near[0]:
        return f"; {near[0]} has no variable, pass it on the command line"
    return f"; did you mean {instead[near[0]]}?"
