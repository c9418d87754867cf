"""The words of a command line: other spellings of options, and where the program begins. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import takewhile

from meshrun.errors import UsageError

_ELSEWHERE = {
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
"""What other launchers, and torch, call the same."""
_TOPIC = re.compile(r"[a-z][a-z_-]*")
"""A word after ``--help`` that is not a program."""
_MEANT = {word: option for option, words in _ELSEWHERE.items() for word in words.split()}
_FORMATS, _TIMES = re.compile("text|json|svg"), re.compile(r"[\d.]+\w*")
_OF_A_SWITCH = {
    "--dry-run": (_FORMATS, "--dry-run --format {}"),
    "--where": (_FORMATS, "--where --format {}"),
    "--check": (re.compile("quick|full"), "--check ... {}, after the options"),
    "--status": (_TIMES, "--status --status-interval {}"),
    "--stragglers": (_TIMES, "--stragglers --straggler-time {}"),
    "--warm": (_TIMES, "--warm --warm-idle {}"),
}
"""Values that are given to options without one, and how to say what they mean."""
_OFF = re.compile("0|no|off|false", re.IGNORECASE)
LAUNCHERS = frozenset({"--mesh", "--nnodes", "--standalone", "--hosts", "--hostfile"})
"""Options of one word that few programs have as well."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A command line as it was parsed, for others to be made of it."""

    options: tuple[str, ...]
    """Words before the program, in full spelling."""
    program: tuple[str, ...]
    """The program and its arguments, as they were typed."""
    takes_value: Mapping[str, bool]
    """Each option by its name, and whether a value follows it."""

    def words(self, *, without: Collection[str] = ()) -> list[str]:
        """Return all words, but for some options and their values."""
        kept: list[str] = []
        rest = list(self.options)
        while rest:
            word = rest.pop(0)
            value = rest[:1] if takes_next(word, self.takes_value) else []
            del rest[: len(value)]
            if word.partition("=")[0] not in without:
                kept += [word, *value]
        return [*kept, *self.program_words]

    @property
    def program_words(self) -> list[str]:
        """The program's words, so that none of them is taken for an option."""
        is_like_option = self.program[:1] and self.program[0].startswith("-")
        return ["--", *self.program] if is_like_option else [*self.program]


def takes_next(word: str, takes_value: Mapping[str, bool]) -> bool:
    """Whether the next word is the value of an option, or of the last one in ``-vt``."""
    if word.startswith("--"):
        return takes_value.get(word, False)
    for place, letter in enumerate(word[1:], 2):
        if takes_value.get(f"-{letter}", False):
            return place == len(word)
    return False


def spell_out(
    words: Sequence[str], options: Mapping[str, bool], torchruns: Collection[str] = ()
) -> list[str]:
    """Return ``words`` with each option before the program in its full spelling.

    ``--nproc_per_node=8`` means ``--nproc-per-node=8``, and ``--nproc 8`` too while no other option
    begins so, as argparse reads them for torchrun. The program and what follows stay as they are.

    Args:
        words: The command line without the command.
        options: Each option by its full name, with dashes, and whether a value follows it.
        torchruns: Those of torchrun's; what is short for one of them alone means it, as there.

    Raises:
        UsageError: If there is no such option, or an abbreviation could be more than one.
    """
    spelled: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = _full_name(name.replace("_", "-"), options, torchruns)
        if equals and (name == "--help" or (name[1] != "-" and options.get(name, False))):
            rest.insert(0, value)  # `-r=3`, as argparse reads it; `--help=TOPIC`
            equals = value = ""
        if equals and name.startswith("--") and options.get(name) is False:
            raise UsageError(f"{name} takes no value, found `{value}`", hint=_instead(name, value))
        if name not in options and (name.startswith("--") or not _are_short(word, options)):
            raise UsageError(f"no such option: {name}", hint=_hint(name, options))
        spelled.append(f"{name}{equals}{value}")
        if takes_next(spelled[-1], options) and rest:
            spelled.append(rest.pop(0))
    return spelled + rest


def asked_help(line: CommandLine) -> str:
    """Return which help a command line asks for: ``-h``, ``--help`` or its topic."""
    rest = [*line.options, *line.program]
    while rest:
        word = rest.pop(0)
        is_brief = not word.startswith("--") and _asks_brief(word, line.takes_value)
        if word == "--help" or is_brief:
            following = rest[0] if rest and _TOPIC.fullmatch(rest[0]) else ""
            return following or ("-h" if is_brief else word)
        if takes_next(word, line.takes_value):
            del rest[:1]
    return "--help"


def _asks_brief(word: str, takes_value: Mapping[str, bool]) -> bool:
    """Whether ``-h`` is among the short options in one word."""
    letters = takewhile(lambda letter: not takes_value.get(f"-{letter}", False), word[1:])
    return "h" in letters


def spell_known(
    words: Sequence[str], options: Mapping[str, bool], torchruns: Collection[str] = ()
) -> list[str]:
    """Return what can be read of the options in a command line that cannot, in full spelling.

    A word behind an option that nobody knows may be its value, and is left out with it.
    """
    known: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        try:
            spelled = spell_out([word], options, torchruns)
        except UsageError:
            if "=" in word:
                known += _switch_alone(word, options, torchruns)
            elif rest and not rest[0].startswith("-"):
                del rest[0]
            continue
        if takes_next(spelled[-1], options):
            if not rest:
                break
            spelled.append(rest.pop(0))
        known += spelled
    return known


def _switch_alone(word: str, options: Mapping[str, bool], torchruns: Collection[str]) -> list[str]:
    """Return the switch of a word that gives it a value, if it is one."""
    try:
        (name,) = spell_out([word.partition("=")[0]], options, torchruns)
    except UsageError:
        return []
    return [] if takes_next(name, options) else [name]


def misplaced(args: Sequence[str], options: Collection[str]) -> list[str]:
    """Return the options of meshrun's among a program's arguments that few programs have too."""
    end = args.index("--") if "--" in args else len(args)
    names = (arg.partition("=")[0].replace("_", "-") for arg in args[:end] if arg[:2] == "--")
    ours = (name for name in names if name in options)
    return list(dict.fromkeys(name for name in ours if name in LAUNCHERS or "-" in name[2:]))


def _full_name(name: str, options: Mapping[str, bool], torchruns: Collection[str]) -> str:
    """Return the one option that begins with ``name``, or ``name`` if there is none."""
    if name in options:
        return name
    candidates = sorted(option for option in options if option.startswith(name))
    theirs = [option for option in candidates if option in torchruns]
    if len(theirs) == 1:
        return theirs[0]
    if len(candidates) > 1:
        raise UsageError(
            f"ambiguous option `{name}`: {' or '.join(f'`{option}`' for option in candidates)}",
            hint="write more of the name",
        )
    return candidates[0] if candidates else name


def _are_short(word: str, options: Mapping[str, bool]) -> bool:
    """Whether a word is short options in one: ``-nv``, or ``-r3`` with its value."""
    for letter in word[1:]:
        if options.get(f"-{letter}", False):
            return True
        if f"-{letter}" not in options:
            return False
    return True


def nearest(
    name: str, options: Collection[str], *, most: int = 2, cutoff: float = 0.7
) -> list[str]:
    """Return the options that a name may have been meant for, the nearest first."""
    plain = name.lstrip("-").replace("_", "-")
    meant = f"--{plain}" if f"--{plain}" in options else _MEANT.get(plain)
    return [meant] if meant else get_close_matches(f"--{plain}", options, n=most, cutoff=cutoff)


def _instead(name: str, value: str) -> str:
    """Return what to write where a switch was given a value."""
    pattern, instead = _OF_A_SWITCH.get(name, (None, ""))
    if pattern is not None and pattern.fullmatch(value):
        return instead.format(value)
    return f"leave out {name if _OFF.fullmatch(value) else f'`={value}`'}"


def _hint(name: str, options: Collection[str]) -> str:
    """Return what a name that is no option may have been meant for."""
    near = nearest(name, options)
    meant = " or ".join(f"`{option}`" for option in near)
    return f"did you mean {meant}?" if near else "see `meshrun --help`"
