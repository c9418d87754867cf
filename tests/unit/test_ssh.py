"""What the controller and its agents send each other, and what is sent to other hosts."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun.cli.on_hosts import _run
from meshrun.cli.options import CONTROLLER_OPTIONS, forget_variables
from meshrun.cli.words import spell_out
from meshrun.errors import HostError, UsageError
from meshrun.plan.hostfile import Host
from meshrun.ssh.agent_messages import (
    ERR,
    OUT,
    FrameSplitter,
    Hello,
    format_hello,
    frame,
    greeting,
    read_hello,
)
from meshrun.ssh.host_session import explain_end
from meshrun.ssh.remote_command import agent_command, devices_of, exported, ssh_command

FRAMES = st.lists(st.tuples(st.sampled_from([OUT, ERR]), st.binary(max_size=50)))
TAKES_VALUE = {"--hosts": True, "--mesh": True, "--report": True, "--status": False, "-n": False}


def _pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[first:last] for first, last in pairwise(places)]


@given(st.binary(max_size=60), FRAMES, st.lists(st.integers(0, 1000)))
def test_frames_arrive_whole_however_they_are_cut(
    noise: bytes, frames: list[tuple[bytes, bytes]], cuts: list[int]
) -> None:
    """The shell's output before them is kept apart."""
    data = noise + greeting("abc") + b"".join(frame(*each) for each in frames)
    splitter = FrameSplitter("abc")
    found = [each for piece in _pieces(data, cuts) for each in splitter.feed(piece)]

    assert found == frames
    assert splitter.noise == noise


def test_much_noise_is_not_kept() -> None:
    """If a host prints without end, memory stays bounded and its greeting is still found."""
    splitter = FrameSplitter("abc")
    for _ in range(100):
        assert not list(splitter.feed(b"x" * 10_000))

    assert list(splitter.feed(greeting("abc") + frame(OUT, b"a"))) == [(OUT, b"a")]
    assert len(splitter.noise) < 100_000


def test_the_first_line_is_understood_by_an_agent_of_another_version() -> None:
    """It reads the folders, refuses the version, and ignores what it does not know."""
    hello = Hello(
        nonce="n", version="2", path=["/p"], cwd="/", controller="here", lease_s=1.0, grace_s=2.0
    )
    received = json.loads(format_hello(hello))

    assert received["path"] == ["/p"]
    assert read_hello({**received, "new": True}) == hello


def test_a_launcher_gets_the_command_line_without_the_hosts() -> None:
    """The program's own arguments stay as they are."""
    options = ["--hosts", "a,b", "--mesh=--hosts", "--report=x", "--status", "--ssh=ssh -v"]
    line, _ = spell_out([*options, "a.py", "--hosts", "c"], TAKES_VALUE)

    assert line.words(without={row.flag for row in CONTROLLER_OPTIONS}) == [
        "--mesh=--hosts",
        "--status",
        "a.py",
        "--hosts",
        "c",
    ]


def test_what_is_sent_to_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that frameworks read, those asked for, and none that belongs to one host."""
    env = {
        "PATH": "/bin", "PYTHONPATH": "/p", "NCCL_DEBUG": "INFO", "MESHRUN_STATUS": "1",
        "MESHRUN_HOSTS": "a,b", "MESHRUN_SECRET_FILE": "/s", "PET_NODE_RANK": "1", "HOME": "/h",
        "SLURM_PROCID": "0", "WANDB_KEY": "w", "WANDB_MODE": "m", "EDITOR": "ed",
    }  # fmt: skip
    theirs = [row.variable for row in CONTROLLER_OPTIONS]
    env |= {variable: "x" for variable in theirs if variable is not None}
    monkeypatch.setattr(os, "environ", env)
    forget_variables(CONTROLLER_OPTIONS)
    always = {"PATH", "PYTHONPATH", "NCCL_DEBUG", "MESHRUN_STATUS"}

    assert set(exported(env, [])) == always
    assert set(exported(env, ["WANDB_*"])) == always | {"WANDB_KEY", "WANDB_MODE"}
    assert set(exported(env, ["*"])) == always | {"WANDB_KEY", "WANDB_MODE", "EDITOR"}
    assert exported(env, ["HOME"])["HOME"] == "/h"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LOST", "--export LOST: the variable is not set"),
        ("KEY=abc", "--export expects variable names, found `KEY=...`"),
    ],
)
def test_a_variable_that_cannot_be_exported(name: str, message: str) -> None:
    """The error does not repeat a value, which may be secret."""
    with pytest.raises(UsageError) as caught:
        exported({}, [name])

    assert caught.value.message == message
    assert "abc" not in str(caught.value)


def test_chosen_slots_are_devices() -> None:
    """Without a choice, no variable is set."""
    assert devices_of(Host("a", 4)) == {}
    assert devices_of(Host("a", 4, (0, 2)))["CUDA_VISIBLE_DEVICES"] == "0,2"


def test_ssh_gets_few_options() -> None:
    """The user's own configuration decides the rest."""
    words = ssh_command(["ssh", "-F", "x"], Host("ada@a"), agent_command("/usr/bin/python"), 10)

    assert words[:-1] == [
        "ssh", "-F", "x", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=9", "--", "ada@a",
    ]  # fmt: skip
    assert words[-1].startswith("cd /; exec /usr/bin/python -c '")


@pytest.mark.parametrize(
    ("code", "output", "why", "hint"),
    [
        (127, "sh: 1: exec: /p: not found", "it cannot run /p: sh: 1: exec: /p: not found", "same"),
        (255, "@@@\n@ CHANGED @\nHost key verification failed.", "ssh failed: @ CHANGED @ / ",
         "`ssh ada@a` once"),
        (255, "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
         "ssh failed: @ WARNING: ", "`ssh-keygen -R`, then run `ssh ada@a`"),
        (255, "mux: gone", "ssh failed: mux: gone", "test with `ssh ada@a true`"),
        (255, "\x1b]0;x\x07gone", r"ssh failed: \x1b]0;x\x07gone", "test with `ssh ada@a true`"),
        (255, "", "ssh failed without a message; the process it started may have been killed", ""),
        (0, "nothing was heard", "its agent exited: nothing was heard", ""),
        (-9, "", "ssh was killed by SIGKILL", ""),
        (1, "Traceback\nModuleNotFoundError: No module named 'meshrun'", "/p there has no meshrun",
         "PYTHONPATH"),
        (137, "bash: killed", "the process that ssh started exited with code 137", "test"),
    ],
)  # fmt: skip
def test_why_there_is_no_agent(code: int, output: str, why: str, hint: str) -> None:
    """In the words of ssh or the shell, without ornaments."""
    failure = explain_end(Host("ada@a"), code, output, "/p")

    assert failure.why.startswith(why)
    assert hint in (failure.hint or "")
    assert bool(hint) == bool(failure.hint)


def test_an_agent_on_this_machine_needs_no_ssh() -> None:
    """So the error says that the agent was killed, not ssh."""
    failure = explain_end(Host("a"), -9, "", "/p", starter="")

    assert failure.why == "its agent was killed by SIGKILL"


def test_a_result_that_no_host_sends_is_missed_only_by_a_report() -> None:
    """As if the disk of the first host is full at the end."""
    controller: Any = SimpleNamespace(run=lambda: 0, result=None)
    with pytest.raises(HostError, match="`FILE`: the first host could not send the result"):
        _run(controller, "FILE")

    assert _run(controller, None) == 0
