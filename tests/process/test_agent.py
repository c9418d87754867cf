"""What ssh starts on a host: it says why it ends, for whoever started it to pass on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from meshrun import __version__
from meshrun.ssh.framing import order
from meshrun.ssh.remote_command import boot_command


def start_agent(folder: Path, *, lease_s: float) -> subprocess.Popen[bytes]:
    """Start an agent that hears nothing beyond its first order, and wait until it is ready."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    agent = subprocess.Popen(boot_command(sys.executable), bufsize=0, **pipes)
    assert agent.stdin is not None
    assert agent.stdout is not None
    agent.stdin.write(
        order(
            nonce="n",
            version=__version__,
            path=[],
            cwd=str(folder),
            lease_s=lease_s,
            grace_s=1,
            controller="here",
        )
    )
    read = b""
    while b'"ready"' not in read:
        read += agent.stdout.read(1)
    return agent


def test_silence_ends_it(tmp_path: Path) -> None:
    """Without a word for so long nobody is there for whom it could work."""
    with start_agent(tmp_path, lease_s=0.1) as agent:
        assert agent.stderr is not None
        said = agent.stderr.read().decode()

    assert agent.returncode == 0
    assert said.startswith("no message from the host where meshrun was started for ")


def test_a_signal_ends_it(tmp_path: Path) -> None:
    """At once, where nothing was started yet."""
    with start_agent(tmp_path, lease_s=600.0) as agent:
        agent.send_signal(signal.SIGTERM)
        assert agent.stderr is not None
        said = agent.stderr.read().decode()

    assert agent.returncode == 0
    assert said == "it received SIGTERM\n"
