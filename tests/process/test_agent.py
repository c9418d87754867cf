"""The agent that ssh starts on a host: it reports why it ends, so that the caller can show it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from meshrun import __version__
from meshrun.ssh.agent_messages import Hello, format_hello
from meshrun.ssh.remote_command import boot_command
from tests.kit import PROGRAMS, killed_launcher, lost_host, run_meshrun, start_meshrun

SAYS = """\
import json, struct, sys
order = json.loads(sys.stdin.buffer.readline())
sys.stdout.write(f"\\nmeshrun agent {order['nonce']}\\n")
for kind, length, text in json.load(open(sys.argv[1])):
    sys.stdout.flush()
    sys.stdout.buffer.write(struct.pack(">cI", kind.encode(), length or len(text)) + text.encode())
sys.stdout.flush()
sys.stdin.read()
"""
READY = json.dumps(["Ready", {"own": "", "theirs": "", "machine": ""}])
ERROR = {"kind": "HostError", "message": "\x1b[31mred", "hint": "\x1b]0;title\x07"}
ERROR |= {"exit_code": 3}


def _message(name: str, **fields: object) -> tuple[str, int, str]:
    return "n", 0, json.dumps([name, fields])


def start_agent(folder: Path, *, lease_s: float) -> subprocess.Popen[bytes]:
    """Start an agent that receives only its first line, and wait until it is ready."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    agent = subprocess.Popen(boot_command(sys.executable), bufsize=0, **pipes)
    assert agent.stdin is not None
    assert agent.stdout is not None
    agent.stdin.write(
        format_hello(
            Hello(
                nonce="n",
                version=__version__,
                path=[],
                cwd=str(folder),
                controller="here",
                lease_s=lease_s,
                grace_s=1,
            )
        )
    )
    read = b""
    while b'"Ready"' not in read:
        read += agent.stdout.read(1)
    return agent


def test_an_ssh_that_passes_no_stdin_is_reported(tmp_path: Path) -> None:
    """As with its option -n."""
    (asks := tmp_path / "ssh").write_text(
        '#!/bin/sh\nfor line; do :; done; eval "$line" </dev/null\n'
    )
    asks.chmod(0o755)
    ours = run_meshrun("--ssh", str(asks), "--hosts", "elsewhere", PROGRAMS / "echo.py")

    assert ours.returncode == 69
    *_, hint, _, error = ours.stderr.splitlines()
    assert error.endswith("exited with code 1: its stdin is empty"), ours.stderr
    assert hint.startswith("hint: let ssh pass on its stdin"), ours.stderr


def test_silence_ends_the_agent(tmp_path: Path) -> None:
    """After the lease without a message, it assumes that the host that started it is gone."""
    with start_agent(tmp_path, lease_s=0.1) as agent:
        assert agent.stderr is not None
        said = agent.stderr.read().decode()

    assert agent.returncode == 0
    assert said.startswith("no message from the host where meshrun was started for ")


def test_a_signal_ends_the_agent(tmp_path: Path) -> None:
    """At once, if it has not started anything yet."""
    with start_agent(tmp_path, lease_s=600.0) as agent:
        agent.send_signal(signal.SIGTERM)
        assert agent.stderr is not None
        said = agent.stderr.read().decode()

    assert agent.returncode == 0
    assert said == "it received SIGTERM\n"


@pytest.mark.parametrize(
    "said",
    [
        [("n", 0, "{")],
        [("n", 0, "[" * 100_000)],
        [("n", 2**32 - 1, "")],
        [("x", 1, "x")],
        [("n", 0, "5")],
        [_message("Ready", own=5, theirs="", machine="")],
        [_message("AgentError", why="why")],
        [("n", 0, READY), _message("Listening", address="\x1b[31m", port=1)],
        [("n", 0, READY), _message("LauncherEnded", code="0", has_joined=True, why="")],
        [("n", 0, READY), _message("LauncherReport", text="[" * 100_000)],
        [("n", 0, READY), _message("LauncherError", text=json.dumps({**ERROR, "exit_code": "x"}))],
        [
            ("n", 0, READY),
            _message("LauncherError", text=json.dumps({**ERROR, "kind": "SpecError"})),
        ],
    ],
    ids=lambda said: said[-1][2][:30],
)
def test_invalid_data_from_an_agent_ends_only_its_host(
    said: list[tuple[str, int, str]], tmp_path: Path
) -> None:
    """A compromised host can neither exhaust the controller's memory nor crash it."""
    ours = _with_agent_that(said, tmp_path)

    assert ours.returncode == 69
    assert "error: host elsewhere" in ours.stderr
    assert "invalid data from its agent" in ours.stderr
    assert "bug" not in ours.stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_launcher_that_is_killed_as_it_starts_names_its_host(
    name: str, fake_torch: object, tmp_path: Path
) -> None:
    """Nothing else ends the wait of the other hosts, and nothing else reports it."""
    env = _launchers_begin_with(f"os.kill(os.getpid(), signal.{name})", tmp_path)
    ours = run_meshrun(*_hosts_through_sh(tmp_path), PROGRAMS / "echo.py", env=env)

    assert ours.returncode == 69, ours.stderr
    lost = f"{lost_host('elsewhere')}{killed_launcher(name)}"
    assert ours.stderr == f"meshrun: {lost}\nerror: {lost}\n"


def test_a_signal_before_a_launcher_can_report_it_is_reported(
    fake_torch: object, tmp_path: Path
) -> None:
    """The last line says what ended the launch."""
    env = _launchers_begin_with("print('begins', flush=True), time.sleep(600)", tmp_path)
    words = (*_hosts_through_sh(tmp_path), PROGRAMS / "echo.py")
    with start_meshrun(*words, env=env, folder=tmp_path) as running:
        running.wait_for("begins")
        running.signal(signal.SIGTERM)

        assert running.wait() == 143
    assert running.stderr == "meshrun: stopped by SIGTERM\n"


def test_a_controller_that_is_killed_is_in_the_report(fake_torch: object, tmp_path: Path) -> None:
    """The process in the foreground of the shell writes it."""
    env = _launchers_begin_with("print('begins', flush=True), time.sleep(600)", tmp_path)
    words = (
        *_hosts_through_sh(tmp_path),
        "--report",
        tmp_path / "report.json",
        PROGRAMS / "echo.py",
    )
    with start_meshrun(*words, env=env, folder=tmp_path) as running:
        running.wait_for("begins")
        [controller] = psutil.Process(running.process.pid).children()
        controller.kill()

        assert running.wait() == 71
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["exit_code"], report["trouble"]["kind"]) == (71, "HostError")


def test_a_signal_to_the_agent_is_one_to_its_launcher(fake_torch: object, tmp_path: Path) -> None:
    """Slurm sends it to every process of a step; the exit code is that of the signal."""
    words = (*_hosts_through_sh(tmp_path), "--nproc-per-node", "2", PROGRAMS / "wait.py")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("up", 2)
        below = psutil.Process(running.process.pid).children(recursive=True)
        (agent,) = [each for each in below if each.cmdline()[1:2] == ["agent"]]
        agent.terminate()

        assert running.wait() == 143
    assert running.stderr.splitlines() == [
        "meshrun: SIGTERM: stopping 2 ranks, up to 30 s",
        "meshrun: stopped by SIGTERM",
    ]


def _launchers_begin_with(source: str, folder: Path) -> dict[str, str]:
    """Return an environment in which launchers run an expression while Python starts."""
    (folder / "sitecustomize.py").write_text(
        f"import os, signal, sys, time\nif 'launcher' in sys.orig_argv: {source}\n"
    )
    return {"PYTHONPATH": f"{folder}:{os.environ['PYTHONPATH']}"}


def _hosts_through_sh(folder: Path) -> tuple[str | Path, ...]:
    """Return the options for a host that is this machine by another name."""
    (ssh := folder / "ssh").write_text('#!/bin/sh\nfor line; do :; done; eval "$line"\n')
    ssh.chmod(0o755)
    return "--ssh", ssh, "--hosts", "elsewhere"


def test_an_error_of_another_host_has_no_control_characters(tmp_path: Path) -> None:
    """The controller prints it to its own terminal."""
    said = [
        ("n", 0, READY),
        _message("LauncherError", text=json.dumps(ERROR)),
        _message("LauncherEnded", code=3, has_joined=False, why=""),
    ]
    ours = _with_agent_that(said, tmp_path)

    assert ours.returncode == 3
    assert ours.stderr == "error: \\x1b[31mred\n\nhint: \\x1b]0;title\\x07\n"


@pytest.mark.parametrize(
    ("said", "then", "message"),
    [
        (
            [],
            "read order; echo it received SIGTERM >&2",
            "its agent exited: it received SIGTERM",
        ),
        ([_message("AgentError", why="no port", hint="open one")], "sleep 600", "no port"),
    ],
)
def test_the_first_host_fails_before_its_launcher_starts(
    said: list[tuple[str, int, str]], then: str, message: str, tmp_path: Path
) -> None:
    """The others are to meet there."""
    said = [("n", 0, READY), *said]
    ours = _with_agent_that(said, tmp_path, hosts="elsewhere,other", then=then)

    assert ours.returncode == 69
    hint = "hint: open one\n\n" if said[1:] else ""
    assert ours.stderr == f"{hint}error: host elsewhere: {message}\n"


def _with_agent_that(
    said: list[tuple[str, int, str]], folder: Path, *, hosts: str = "elsewhere", then: str = ""
) -> subprocess.CompletedProcess[str]:
    """Launch on hosts whose agents send ``said``, and with ``then`` end without an order."""
    (agent := folder / "agent.py").write_text(SAYS)
    (folder / "said").write_text(json.dumps(said))
    says = f"{sys.executable} {agent} {folder}/said"
    says = f"head -n 1 | {says}; {then}" if then else f"exec {says}"
    (ssh := folder / "ssh").write_text(f"#!/bin/sh\necho Authorized use only >&2\n{says}\n")
    ssh.chmod(0o755)
    words = ("--hosts", hosts, "--ssh", ssh, "--nproc-per-node", "1", "--device", "cpu")
    return run_meshrun(*words, PROGRAMS / "end.py")
