"""The words of a command line: spellings of options, and where the program begins. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches

from msgspec import Struct

from meshrun.errors import UsageError
from meshrun.plan.choices import FORMATS
from meshrun.wording import either

_OTHER_LAUNCHERS = {
    "--nproc-per-node": "np nprocs n-procs num-procs num-processes num-workers workers ntasks"
    " ntasks-per-node gpus ngpus num-gpus gpus-per-node devices multi-gpu",
    "--nnodes": "N nodes num-nodes num-machines",
    "--node-rank": "machine-rank",
    "--hosts": "H nodelist",
    "--device": "cpu",
    "--numa-binding": "bind-to cpu-bind",
    "--prefix": "l label tag-output",
    "--export": "x env",
    "--master-addr": "main-process-ip",
    "--master-port": "main-process-port",
    "--hostfile": "machinefile",
    "--mesh": "world-size shape mesh-shape dp tp pp cp ep fsdp tensor-parallel-size"
    " pipeline-parallel-size data-parallel-size",
    "--names": "mesh-dim-names dim-names",
}
"""Names that other launchers and torch use for an option."""
_SYNONYMS = {name: option for option, names in _OTHER_LAUNCHERS.items() for name in names.split()}
_HELP = ("-h", "--help")
_TOPIC = re.compile(r"-{0,2}[a-z][a-z_-]*")
"""A word after ``--help`` that is not a program."""
_FORMATS, _TIMES = re.compile("|".join(FORMATS)), re.compile(r"[\d.]+\w*")
_SWITCH_VALUES = {
    "--dry-run": (_FORMATS, "--dry-run --format {}"),
    "--where": (_FORMATS, "--where --format {}"),
    "--check": (re.compile("quick|full"), "--check ... {}, after the options"),
    "--status": (_TIMES, "--status --status-interval {}"),
    "--stragglers": (_TIMES, "--stragglers --straggler-time {}"),
    "--warm": (_TIMES, "--warm --warm-idle {}"),
}
"""Values that users give to switches, and the correct spelling of what they mean."""
_OFF = re.compile("0|no|off|false", re.IGNORECASE)
LAUNCHER_OPTIONS = frozenset({"--mesh", "--nnodes", "--standalone", "--hosts", "--hostfile"})
"""Options of one word that belong to a launcher rather than a program."""


class CommandLine(Struct, frozen=True):
    """A parsed command line, from which command lines for other processes are made."""

    options: tuple[tuple[str, str | None], ...] = ()
    """The flags before the program, in full spelling, each with its value if it takes one."""
    program: tuple[str, ...] = ()
    """The program and its arguments."""

    def words(self, *, without: Collection[str] = ()) -> list[str]:
        """Return all words except some options and their values."""
        kept = [pair for pair in self.options if pair[0] not in without]
        return [*(word for pair in kept for word in as_words(*pair)), *self.program_words]

    @property
    def program_words(self) -> list[str]:
        """The program's words, after ``--`` if they would otherwise be read differently."""
        is_like_option = self.program[:1] and self.program[0].startswith("-")
        needs_dashes = is_like_option or self.program[1:2] == ("--",)
        return ["--", *self.program] if needs_dashes else [*self.program]


def as_words(flag: str, value: str | None) -> tuple[str, ...]:
    """Return an option as words that are read as it, whatever its value."""
    if value is None:
        return (flag,)
    return (f"{flag}={value}",) if value.startswith("-") else (flag, value)


def spell_out(
    words: Sequence[str], takes_value: Mapping[str, bool], torchrun_flags: Collection[str] = ()
) -> tuple[CommandLine, UsageError | None]:
    """Return what ``words`` say for certain, and why they are invalid, if they are.

    ``--nproc_per_node=8`` means ``--nproc-per-node 8``, and so does ``--nproc 8`` if no other
    option starts with it, as argparse reads them for torchrun; ``-mt=3`` means ``-m -t 3``. As
    there, a ``--`` directly after the program is left out, unless one precedes it; the program's
    arguments are not changed. A word after an unknown option may be its value and is left out, too.
    An abbreviation of only one of ``torchrun_flags`` means that one. An option is no value of the
    one before it, whose value an unset variable was probably meant to be, and none follows a
    request for help.
    """
    options: list[tuple[str, str | None]] = []
    error, rest = None, list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        read = _read_option if word.startswith("--") else _read_letters
        flags, following, wrong = read(word, takes_value, torchrun_flags)
        error = error or wrong
        rest[:0] = following
        pairs: list[tuple[str, str | None]] = [(flag, None) for flag in flags]
        if flags and takes_value[flags[-1]]:
            del pairs[-1]
            lacks = None if following else _lacks_value(flags[-1], rest, takes_value)
            pairs += [] if lacks else [(flags[-1], rest.pop(0))]
            error = error or lacks
        elif not flags and "=" not in word and rest and not rest[0].startswith("-"):
            del rest[0]
        options += pairs
        if flags and flags[-1] in _HELP:
            break
    if rest[:1] == ["--"]:
        del rest[0]
    elif rest[1:2] == ["--"]:
        del rest[1]
    return CommandLine(tuple(options), tuple(rest)), error


def requested_help(line: CommandLine) -> str:
    """Return the help that a command line requests: ``-h``, ``--help`` or its topic."""
    flags = [flag for flag, _ in line.options]
    asked = next(flag for flag in flags if flag in _HELP)
    is_last, topic = flags[-1] == asked, line.program[:1]
    return topic[0] if is_last and topic and _TOPIC.fullmatch(topic[0]) else asked


def misplaced(args: Sequence[str], options: Collection[str]) -> list[str]:
    """Return the options of meshrun among a program's arguments that few programs have."""
    end = args.index("--") if "--" in args else len(args)
    names = (arg.partition("=")[0].replace("_", "-") for arg in args[:end] if arg[:2] == "--")
    ours = (name for name in names if name in options)
    return list(dict.fromkeys(name for name in ours if name in LAUNCHER_OPTIONS or "-" in name[2:]))


_Read = tuple[list[str], list[str], UsageError | None]
"""A word's flags in full spelling, the words that follow them, and what is wrong with it."""


def _read_option(
    word: str, takes_value: Mapping[str, bool], torchrun_flags: Collection[str]
) -> _Read:
    """Read ``--mesh``, ``--mesh=VALUE``, or the only option that starts with a word."""
    given, equals, value = word.partition("=")
    name = given.replace("_", "-")
    if name not in takes_value:
        candidates = sorted(option for option in takes_value if option.startswith(name))
        theirs = [option for option in candidates if option in torchrun_flags]
        candidates = theirs if len(theirs) == 1 else candidates
        if not candidates:
            return [], [], _unknown(name, takes_value)
        if len(candidates) > 1:
            meant = either([f"`{option}`" for option in candidates])
            message = f"ambiguous option `{name}`: {meant}"
            return [], [], UsageError(message, hint="write more of the name")
        name = candidates[0]
    if equals and not takes_value[name] and name != "--help":
        return [name], [], _needless(name, value)
    return [name], [value] if equals else [], None


def _read_letters(word: str, takes_value: Mapping[str, bool], _: Collection[str]) -> _Read:
    """Read ``-nv``, or ``-nr3`` or ``-nr=3`` with a value."""
    flags: list[str] = []
    for place, letter in enumerate(word[1:], 2):
        if letter == "=" and flags:
            return flags, [], _needless(flags[-1], word[place:])
        if f"-{letter}" not in takes_value:
            return [], [], _unknown(word.partition("=")[0], takes_value)
        flags.append(f"-{letter}")
        if takes_value[flags[-1]]:
            value = word[place:]
            return flags, [value.removeprefix("=")] if value else [], None
    return flags, [], None


def _unknown(name: str, options: Collection[str]) -> UsageError:
    meant = either([f"`{option}`" for option in nearest(name, options)])
    hint = f"did you mean {meant}?" if meant else "see `meshrun --help`"
    if " " in name:
        hint = "this is one word with spaces: pass its parts as separate words, in Python as a list"
    return UsageError(f"no such option: {name}", hint=hint)


def _needless(name: str, value: str) -> UsageError:
    pattern, instead = _SWITCH_VALUES.get(name, (None, ""))
    hint = f"leave out {name if _OFF.fullmatch(value) else f'`={value}`'}"
    if pattern is not None and pattern.fullmatch(value):
        hint = instead.format(value)
    return UsageError(f"{name} takes no value, found `{value}`", hint=hint)


def _lacks_value(
    flag: str, rest: Sequence[str], takes_value: Mapping[str, bool]
) -> UsageError | None:
    """Return an error if no value follows an option, but nothing or another option."""
    message = f"{flag} requires a value"
    if not rest:
        return UsageError(message, hint=f"see `meshrun --help {flag}`")
    word = rest[0]
    name = word.partition("=")[0].replace("_", "-")
    if word[:1] != "-" or " " in word or (name != "--" and name not in takes_value):
        return None
    hint = f"a variable may be empty; to pass `{word}` itself, write {flag}={word}"
    return UsageError(f"{message}, found `{word}`", hint=hint)


def nearest(
    name: str, options: Collection[str], *, most: int = 2, cutoff: float = 0.7
) -> list[str]:
    """Return the options that the user may have meant by a name, the nearest first."""
    plain = name.lstrip("-").replace("_", "-")
    meant = f"--{plain}" if f"--{plain}" in options else _SYNONYMS.get(plain)
    return [meant] if meant else get_close_matches(f"--{plain}", options, n=most, cutoff=cutoff)
