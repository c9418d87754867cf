"""How a command line is split into options and the program, and how options are spelled."""

import os
from argparse import REMAINDER, ArgumentParser

import pytest
from msgspec.structs import replace

from meshrun.cli.command import read_options
from meshrun.cli.options import Options
from meshrun.cli.run import command_for_others
from meshrun.cli.words import CommandLine, misplaced, requested_help, spell_out
from meshrun.errors import UsageError

OPTIONS = {
    "--nproc-per-node": True,
    "--nnodes": True,
    "--no-prefix": False,
    "--mesh": True,
    "--module": False,
    "--help": False,
    "-m": False,
    "-r": True,
}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--nproc_per_node 8 a.py", "--nproc-per-node 8 a.py"),
        ("--nproc_per_node=8 a.py", "--nproc-per-node 8 a.py"),
        ("--nproc 8 a.py", "--nproc-per-node 8 a.py"),
        ("--nnode=2 a.py --nnode=2", "--nnodes 2 a.py --nnode=2"),
        ("--mesh -1x4 a.py", "--mesh=-1x4 a.py"),
        ("--mesh --nproc a.py", "--mesh=--nproc a.py"),
        ("-m --nproc 2 pkg --mesh_size", "-m --nproc-per-node 2 pkg --mesh_size"),
        ("-r 3 a.py --no_prefix", "-r 3 a.py --no_prefix"),
        ("-r _m a.py", "-r _m a.py"),
        ("-r=3 a.py -r=1", "-r 3 a.py -r=1"),
        ("--help=mesh a.py", "--help mesh a.py"),
        ("--hel=mesh", "--help mesh"),
        ("-r=0:1,1:2 -r= a.py", "-r 0:1,1:2 -r  a.py"),
        ("-mr 3 --nproc 2 a.py", "-m -r 3 --nproc-per-node 2 a.py"),
        ("-mr=3 --nproc 2 a.py", "-m -r 3 --nproc-per-node 2 a.py"),
        ("-r3m --nproc 2 a.py", "-r 3m --nproc-per-node 2 a.py"),
        ("-r--mesh a.py --mesh", "-r=--mesh a.py --mesh"),
        ("-- a.py --nproc 2", "a.py --nproc 2"),
        ("a.py --unknown", "a.py --unknown"),
        ("", ""),
    ],
)
def test_options_are_spelled_out(given: str, meant: str) -> None:
    """Before the program, in all of torchrun's spellings; after it, untouched."""
    line, error = spell_out(given.split(), OPTIONS)

    assert (line.words(), error) == (meant.split(" ") if meant else [], None)


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ("--nnode=2 --mish=2 --mesh 2 a.py --mesh 3", "--nnodes 2 --mesh 2"),
        ("--mish 2 --mesh 2 a.py", "--mesh 2"),
        ("--m 2 -r=3 --mesh", "-r 3"),
        ("--mish --mesh 2", "--mesh 2"),
        ("--mish a.py --mesh 2 b.py", "--mesh 2"),
        ("-x -- --mesh 2", ""),
        ("-mm=1 --mesh 2 a.py", "-m -m --mesh 2"),
        ("--mish", ""),
        ("--mesh --nnodes=2 a.py", "--nnodes 2"),
        ("--mesh --no_prefix a.py", "--no-prefix"),
        ("--mesh -- a.py", ""),
        ("--modul=1 --mish=2 --nnode=x --mesh 2", "--module --nnodes x --mesh 2"),
    ],
)
def test_what_can_be_parsed_of_a_line_that_cannot(given: str, known: str) -> None:
    """Unknown options, and what may be their values, are left out."""
    line, error = spell_out(given.split(), OPTIONS)

    assert " ".join(replace(line, program=()).words()) == known
    assert error is not None


def test_an_ambiguous_abbreviation_is_refused() -> None:
    """The error names the candidates."""
    error = spell_out(["--m", "2"], OPTIONS)[1]

    assert error is not None
    assert error.message == "ambiguous option `--m`: `--mesh` or `--module`"


def test_torchruns_abbreviations_keep_their_meaning() -> None:
    """One that is unique in torchrun is not ambiguous here, whatever options meshrun adds."""
    options = {"--tee": True, "--timeout": True, "--timings": False}

    line, _ = spell_out(["--t", "3", "x.py"], options, {"--tee"})
    assert line.words() == ["--tee", "3", "x.py"]
    line, _ = spell_out(["--timi", "x.py"], options, {"--tee"})
    assert line.words() == ["--timings", "x.py"]
    line, _ = spell_out(["--tee", "--timings=3 -x", "x.py"], options, {"--tee"})
    assert line.words() == ["--tee=--timings=3 -x", "x.py"]
    _, error = spell_out(["--ti", "x.py"], options, {"--tee"})
    assert error is not None
    assert error.message.endswith("`--timeout` or `--timings`")
    assert read(["--h"]).options == (("--help", None),)


PROGRAMS = [
    "a.py", "a.py b --hosts c -- d", "-- -a.py -b", "pkg -m",
    "pkg -- --b", "a.py --", "a.py -- -- b", "-- a.py -- b", "-- -- -- b",
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    "options",
    [
        "",
        "--module",
        "--no-python --mesh=dp=2",
        "-vt 3 --node_r 0",
        "--role=--hosts -r=3 --hosts x --log-dir=--",
    ],
)
def test_the_program_begins_where_the_parser_says(
    options: str, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It and its arguments are what argparse finds, and so torchrun.

    Commands that are built from a command line are parsed alike.
    """
    monkeypatch.setenv("PYTHON_EXEC", "/usr/bin/other")
    torchrun = ArgumentParser()
    torchrun.add_argument("program")
    torchrun.add_argument("args", nargs=REMAINDER)
    expected = torchrun.parse_args(program.split())
    line = read([*options.split(), *program.split()])

    assert line.program == (expected.program, *expected.args)
    assert read(line.words()) == line
    for names in (["--hosts"], ["--module", "--role", "--tee"]):
        assert read(line.words(without=names)).program == line.program
    assert "--node-rank" not in command_for_others(line)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--dry-run=json", "--dry-run --format json"),
        ("--dry_r=svg", "--dry-run --format svg"),
        ("--dry-run=1", "leave out `=1`"),
        ("--dry-run=no", "leave out --dry-run"),
        ("--where=json", "--where --format json"),
        ("--check=quick", "--check ... quick, after the options"),
        ("--warm=5m", "--warm --warm-idle 5m"),
        ("--collapse=yes", "leave out `=yes`"),
        ("-mv=yes", "leave out `=yes`"),
    ],
)
def test_a_switch_with_a_value_is_refused(word: str, hint: str) -> None:
    """The hint says what was probably meant, such as a plan in another format."""
    with pytest.raises(UsageError, match=r"--?[a-z-]+ takes no value, found `\w+`") as caught:
        read([word, "--mesh", "2", "a.py"])

    assert caught.value.hint == hint


def read(words: list[str]) -> CommandLine:
    return read_options(Options, words).line


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("-mesh", "did you mean `--mesh`?"),
        ("-mesh=dp=2", "did you mean `--mesh`?"),
        ("--mehs", "did you mean `--mesh`?"),
        ("-np", "did you mean `--nproc-per-node`?"),
        ("-np=2", "did you mean `--nproc-per-node`?"),
        ("--nprocs", "did you mean `--nproc-per-node`?"),
        ("--num_processes=2", "did you mean `--nproc-per-node`?"),
        ("--num-nodes", "did you mean `--nnodes`?"),
        ("-H", "did you mean `--hosts`?"),
        ("-X", "see `meshrun --help`"),
        ("--learning-rate", "see `meshrun --help`"),
        (
            "--max-restarts 3",
            "this is one word with spaces: pass its parts as separate words, in Python as a list",
        ),
    ],
)
def test_an_option_that_does_not_exist_is_refused(word: str, hint: str) -> None:
    """Those of other launchers are recognized by their names."""
    error = spell_out([word, "2", "a.py"], OPTIONS)[1]

    assert error is not None
    assert error.message.startswith("no such option: -")
    assert error.hint == hint


@pytest.mark.parametrize(
    ("args", "found"),
    [
        ("--mesh dp=2 --lr 1", ["--mesh"]),
        ("--nproc_per_node=2 --nnodes 2 --nnodes 3", ["--nproc-per-node", "--nnodes"]),
        ("--module x -m --mes -r 3", []),
        ("-- --mesh dp=2", []),
        ("", []),
    ],
)
def test_options_among_the_arguments(args: str, found: list[str]) -> None:
    """Those that few programs have themselves; options that many programs have are left alone."""
    assert misplaced(args.split(), OPTIONS) == found


@pytest.mark.parametrize(
    ("options", "program", "asked"),
    [
        ("-h", "", "-h"),
        ("--help", "", "--help"),
        ("--help", "mesh", "mesh"),
        ("-h", "mesh", "mesh"),
        ("-m -h", "", "-h"),
        ("--mesh=--help --help", "no-prefix", "no-prefix"),
        ("--help", "--nnodes", "--nnodes"),
        ("--help", "--nnodes=2", "--help"),
        ("--help", "-- mesh", "mesh"),
        ("--nnodes 2 --help", "train.py --mesh 2", "--help"),
        ("-r=-h --help", "-n --no-prefix mesh", "-n"),
        ("-rh -h", "./mesh", "-h"),
    ],
)
def test_a_word_after_help_is_its_topic(options: str, program: str, asked: str) -> None:
    """Unless it can only be the program."""
    line, _ = spell_out([*options.split(), *program.split()], {**OPTIONS, "-h": False})

    assert requested_help(line) == asked


def test_a_variable_without_a_name_sets_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment may contain one, and some options have no variable."""
    monkeypatch.setattr(os, "environ", {"": "x"})

    assert read_options(Options, ["a.py"]).values == {}
