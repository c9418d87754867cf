"""Where events and log files go: the console, and plug-ins of installed packages."""

import json
import os
import select
import socket
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.kit import PROGRAMS, command, run_meshrun, wait_until


def test_events_go_to_the_console(fake_torch: object) -> None:
    """With the names that torch elastic uses."""
    ours = run_meshrun("--event-log-handler", "console", PROGRAMS / "echo.py")
    events = [json.loads(line) for line in ours.stderr.splitlines() if line.startswith("{")]

    assert [(event["source"], event["metadata"]["state"]) for event in events] == [
        ("AGENT", "RENDEZVOUS"),
        ("AGENT", "ASSIGN_WORKER_RANKS"),
        ("WORKER", "START"),
        ("WORKER", "SUCCEEDED"),
        ("AGENT", "SUCCEEDED"),
    ]


def test_events_tell_generations_and_failures_apart(fake_torch: object, tmp_path: Path) -> None:
    """A worker's id is its process id, and its error is what ``@record`` writes."""
    (program := tmp_path / "fails.py").write_text(
        "import os, signal\n"
        "there = os.environ['THERE'] + os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "if os.environ['RANK'] == '0':\n"
        "    open(there).close()\n"  # a fifo, which opens once rank 1 has opened it too
        "    raise RuntimeError('oops')\n"
        "open(there, 'w')\n"
        "signal.pause()\n"
    )
    for generation in range(2):
        os.mkfifo(tmp_path / f"there{generation}")
    words = ("--nproc-per-node", "2", "--max-restarts", "1", "--event-log-handler", "console")
    ours = run_meshrun(*words, program, env={"THERE": str(tmp_path / "there")})
    events = [json.loads(line) for line in ours.stderr.splitlines() if line.startswith("{")]
    workers = [each["metadata"] for each in events if each["source"] == "WORKER"]
    second, ended = workers[2:4], workers[4:]

    assert [each["agent_restarts"] for each in workers] == [0, 0, 1, 1, 1, 1]
    assert {each["worker_id"] for each in second} == {each["worker_id"] for each in ended}
    assert [each["state"] for each in ended] == ["FAILED", "TERMINATED"]
    assert json.loads(ended[0]["raw_error"])["message"]["message"] == "RuntimeError: oops"
    assert ended[1]["raw_error"] is None


def test_a_slow_reader_gets_the_end_of_every_worker(fake_torch: object) -> None:
    """The launch waits until its last events have been read."""
    reader, stdout = socket.socketpair()
    stdout.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8_000)
    words = ("--nproc-per-node", "16", "--event-log-handler", "console", "--no-python", "true")
    with reader, subprocess.Popen(command(*words), stdout=stdout, stderr=stdout):
        with stdout:
            wait_until(lambda: not select.select([], [stdout], [], 0)[1], lambda: "a full socket")
        events = [json.loads(line) for line in reader.makefile()]

    states = Counter(event["metadata"]["state"] for event in events)
    assert (states["START"], states["SUCCEEDED"]) == (16, 17)


def test_events_of_nodes_that_do_not_meet(fake_torch: object) -> None:
    """No worker ends without having started, and the launch's error says why."""
    ours = run_meshrun(
        "--nnodes", "2", "--nproc-per-node", "2", "--master-port", "0", "--node-rank", "0",
        "--rdzv-conf", "timeout=1", "--event-log-handler", "console", PROGRAMS / "echo.py",
    )  # fmt: skip
    events = [json.loads(line) for line in ours.stderr.splitlines() if line.startswith("{")]

    states = [(event["source"], event["metadata"]["state"]) for event in events]
    assert states == [("AGENT", "RENDEZVOUS"), ("AGENT", "FAILED")], ours.stderr
    assert events[0]["metadata"]["duration_ms"] >= 1000
    assert "1 of 2 nodes joined" in events[1]["metadata"]["raw_error"]


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package with both kinds of plug-in for one test."""
    folder = tmp_path / "site"
    info = folder / "plug_in-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plug-in\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[torchrun.event_log_handlers]\nfile = plug_in:Handler\n"
        "[torchrun.logs_specs]\nflat = plug_in_logs:Flat\n"
    )
    (folder / "plug_in.py").write_text(
        "import logging, os\n"
        "class Handler(logging.FileHandler):\n"
        "    def __init__(self): super().__init__(os.environ['EVENTS'])\n"
    )
    (folder / "plug_in_logs.py").write_text(
        "import os\n"
        "from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest\n"
        "class Flat(DefaultLogsSpecs):\n"
        "    def reify(self, envs):\n"
        "        name = lambda rank: f'{self.root_log_dir}/{envs[rank][\"RANK\"]}.out'\n"
        "        return LogsDest(stdouts={r: name(r) for r in envs},\n"
        "            stderrs={r: '' for r in envs}, tee_stdouts={0: name(0)},\n"
        "            error_files={r: name(r) + '.json' for r in envs})\n"
    )
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), path))))
    return folder


def test_events_go_to_a_plug_in(plug_in: Path, tmp_path: Path, fake_torch: object) -> None:
    """It is found by its entry point."""
    path = tmp_path / "events"
    python_path = f"{plug_in}{os.pathsep}{os.environ['PYTHONPATH']}"
    ours = run_meshrun(
        "--event-log-handler", "file", PROGRAMS / "echo.py",
        env={"EVENTS": str(path), "PYTHONPATH": python_path},
    )  # fmt: skip

    assert ours.returncode == 0, ours.stderr
    assert [json.loads(line)["source"] for line in path.read_text().splitlines()] == [
        "AGENT", "AGENT", "WORKER", "WORKER", "AGENT",
    ]  # fmt: skip


@pytest.mark.torch
def test_a_plug_in_chooses_the_log_files(plug_in: Path, tmp_path: Path) -> None:
    """It subclasses torch's LogsSpecs; of two with the same name, the first is used."""
    info = tmp_path / "later" / "another-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: another\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torchrun.logs_specs]\nflat = nowhere:Flat\n")
    ours = run_meshrun(
        "--nproc-per-node", "2", "--logs-specs", "flat", "--log-dir", tmp_path / "logs",
        PROGRAMS / "echo.py", env={"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{info.parent}"},
    )  # fmt: skip

    assert ours.stdout == "[rank 0] out 0\n"
    assert (tmp_path / "logs" / "1.out").read_text() == "out 1\n"


@pytest.mark.parametrize("option", ["--logs-specs", "--event-log-handler"])
def test_a_plug_in_that_does_not_exist(option: str, fake_torch: Path) -> None:
    """The error names the group of entry points."""
    ours = run_meshrun(option, "nobody", PROGRAMS / "echo.py")

    assert ours.returncode == 2
    assert "`nobody`" in ours.stderr
    assert "entry point in " in ours.stderr
    assert not fake_torch.exists()
