"""The words of a command line: spellings of options, and where the program begins. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from meshrun.errors import UsageError

_OTHER_LAUNCHERS = {
    "--nproc-per-node": "np nprocs n-procs num-procs num-processes num-workers workers ntasks"
    " ntasks-per-node gpus ngpus num-gpus gpus-per-node devices",
    "--nnodes": "nodes num-nodes num-machines",
    "--node-rank": "machine-rank",
    "--master-addr": "main-process-ip",
    "--master-port": "main-process-port",
    "--hostfile": "machinefile",
    "--mesh": "world-size shape mesh-shape",
    "--names": "mesh-dim-names dim-names",
}
"""Names that other launchers and torch use for an option."""
_SYNONYMS = {name: option for option, names in _OTHER_LAUNCHERS.items() for name in names.split()}
_TOPIC = re.compile(r"[a-z][a-z_-]*")
"""A word after ``--help`` that is not a program."""
_FORMATS, _TIMES = re.compile("text|json|svg"), re.compile(r"[\d.]+\w*")
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


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A parsed command line, from which command lines for other processes are made."""

    options: tuple[str, ...]
    """Words before the program, in full spelling."""
    program: tuple[str, ...]
    """The program and its arguments."""
    takes_value: Mapping[str, bool]
    """For each flag, whether a value follows it."""

    def words(self, *, without: Collection[str] = ()) -> list[str]:
        """Return all words except some options and their values."""
        kept: list[str] = []
        rest = list(self.options)
        while rest:
            word = rest.pop(0)
            value = [rest.pop(0)] if rest and self.takes_value.get(word, False) else []
            if word.partition("=")[0] not in without:
                kept += [word, *value]
        return [*kept, *self.program_words]

    @property
    def program_words(self) -> list[str]:
        """The program's words, after ``--`` if they would otherwise be read differently."""
        is_like_option = self.program[:1] and self.program[0].startswith("-")
        needs_dashes = is_like_option or self.program[1:2] == ("--",)
        return ["--", *self.program] if needs_dashes else [*self.program]


def spell_out(
    words: Sequence[str], takes_value: Mapping[str, bool], torchrun_flags: Collection[str] = ()
) -> list[str]:
    """Return ``words`` with each option before the program in its full spelling.

    ``--nproc_per_node=8`` means ``--nproc-per-node=8``, and so does ``--nproc 8`` if no other
    option starts with it, as argparse reads them for torchrun; ``-mt=3`` means ``-m -t 3``. As
    there, a ``--`` directly after the program is left out, unless one precedes it; the program's
    arguments are not changed.

    Args:
        words: The command line without the command.
        takes_value: For each flag, whether a value follows it.
        torchrun_flags: Flags of torchrun; an abbreviation of only one of them means that one.

    Raises:
        UsageError: If there is no such option, or an abbreviation is ambiguous.
    """
    spelled: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        if not word.startswith("--"):
            flags, values = _one_by_one(word, takes_value)
            spelled += flags
            rest[:0] = values
        else:
            name, equals, value = word.partition("=")
            name = _full_name(name.replace("_", "-"), takes_value, torchrun_flags)
            if name not in takes_value:
                raise _unknown(name, takes_value)
            if equals and name == "--help":
                rest.insert(0, value)
                equals = value = ""
            if equals and not takes_value[name]:
                raise _needless(name, value)
            spelled.append(f"{name}{equals}{value}")
        if takes_value.get(spelled[-1], False) and rest:
            spelled.append(rest.pop(0))
    if rest[1:2] == ["--"] and rest[0] != "--":
        del rest[1]
    return spelled + rest


def requested_help(line: CommandLine) -> str:
    """Return the help that a command line requests: ``-h``, ``--help`` or its topic."""
    rest = [*line.options, *line.program]
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            return rest[0] if rest and _TOPIC.fullmatch(rest[0]) else word
        if line.takes_value.get(word, False):
            del rest[:1]
    return "--help"


def spell_out_known(
    words: Sequence[str], takes_value: Mapping[str, bool], torchrun_flags: Collection[str] = ()
) -> list[str]:
    """Return the options of an invalid command line that can be read, in full spelling.

    A word after an unknown option may be its value and is left out, too.
    """
    known: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        try:
            spelled = spell_out([word], takes_value, torchrun_flags)
        except UsageError:
            if "=" in word:
                known += _switch_alone(word, takes_value, torchrun_flags)
            elif rest and not rest[0].startswith("-"):
                del rest[0]
            continue
        if takes_value.get(spelled[-1], False):
            if not rest:
                break
            spelled.append(rest.pop(0))
        known += spelled
    return known


def _switch_alone(
    word: str, takes_value: Mapping[str, bool], torchrun_flags: Collection[str]
) -> list[str]:
    """Return the flags of switches that were given a value, without the value."""
    try:
        flags = spell_out([word.partition("=")[0]], takes_value, torchrun_flags)
    except UsageError:
        return []
    return [] if takes_value.get(flags[-1], False) else flags


def misplaced(args: Sequence[str], options: Collection[str]) -> list[str]:
    """Return the options of meshrun among a program's arguments that few programs have."""
    end = args.index("--") if "--" in args else len(args)
    names = (arg.partition("=")[0].replace("_", "-") for arg in args[:end] if arg[:2] == "--")
    ours = (name for name in names if name in options)
    return list(dict.fromkeys(name for name in ours if name in LAUNCHER_OPTIONS or "-" in name[2:]))


def _full_name(name: str, options: Collection[str], torchrun_flags: Collection[str]) -> str:
    """Return the only option that starts with ``name``, or ``name`` if there is none."""
    if name in options:
        return name
    candidates = sorted(option for option in options if option.startswith(name))
    theirs = [option for option in candidates if option in torchrun_flags]
    if len(theirs) == 1:
        return theirs[0]
    if len(candidates) > 1:
        raise UsageError(
            f"ambiguous option `{name}`: {' or '.join(f'`{option}`' for option in candidates)}",
            hint="write more of the name",
        )
    return candidates[0] if candidates else name


def _one_by_one(word: str, takes_value: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Return the short options of ``-nv``, or of ``-nr3`` or ``-nr=3``, and the value if any.

    Raises:
        UsageError: If one does not exist, or a value follows one that takes none.
    """
    flags: list[str] = []
    for place, letter in enumerate(word[1:], 2):
        if letter == "=" and flags:
            raise _needless(flags[-1], word[place:])
        if f"-{letter}" not in takes_value:
            raise _unknown(word.partition("=")[0], takes_value)
        flags.append(f"-{letter}")
        if takes_value[flags[-1]]:
            value = word[place:]
            return flags, [value.removeprefix("=")] if value else []
    return flags, []


def _unknown(name: str, options: Collection[str]) -> UsageError:
    return UsageError(f"no such option: {name}", hint=_hint(name, options))


def _needless(name: str, value: str) -> UsageError:
    return UsageError(f"{name} takes no value, found `{value}`", hint=_instead(name, value))


def nearest(
    name: str, options: Collection[str], *, most: int = 2, cutoff: float = 0.7
) -> list[str]:
    """Return the options that the user may have meant by a name, the nearest first."""
    plain = name.lstrip("-").replace("_", "-")
    meant = f"--{plain}" if f"--{plain}" in options else _SYNONYMS.get(plain)
    return [meant] if meant else get_close_matches(f"--{plain}", options, n=most, cutoff=cutoff)


def _instead(name: str, value: str) -> str:
    """Return a hint for a switch that was given a value."""
    pattern, instead = _SWITCH_VALUES.get(name, (None, ""))
    if pattern is not None and pattern.fullmatch(value):
        return instead.format(value)
    return f"leave out {name if _OFF.fullmatch(value) else f'`={value}`'}"


def _hint(name: str, options: Collection[str]) -> str:
    """Return a hint for an unknown option."""
    near = nearest(name, options)
    meant = " or ".join(f"`{option}`" for option in near)
    return f"did you mean {meant}?" if near else "see `meshrun --help`"
