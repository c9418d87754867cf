"""Metrics, probes and events, read by other programs."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import jsonschema
import pytest

from meshrun.report.launch_events import WholeLines
from tests.kit import ROOT, Running, run_meshrun, start_meshrun, wait_until

SCHEMA = json.loads((ROOT / "docs" / "reference" / "events.schema.json").read_text())
TRAIN = """
import os, sys, time
from meshrun import progress
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if is_first and os.environ["RANK"] == "1":
    raise ValueError("the loss is nan")
if is_first:
    time.sleep(3600)
progress(7)
print("up", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


def ask(url: str, accept: str = "*/*") -> tuple[int, str, str]:
    """Return the status, content type and body of a reply."""
    request = urllib.request.Request(url, headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def address(ours: Running) -> str:
    found: list[str] = []

    def look() -> bool:
        found[:] = re.findall(r"metrics are at (\S+)/metrics", ours.stderr)
        return bool(found)

    wait_until(look, lambda: ours.stderr)
    return found[0]


def read_events(text: str) -> list[dict[str, object]]:
    """Return the events, each validated against the schema."""
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        jsonschema.validate(line, SCHEMA)
    return lines


def test_a_launch_can_be_observed_from_outside(fake_torch: object, tmp_path: Path) -> None:
    """Metrics of restarts, steps and states; probes; and one line per event."""
    program, stop, events = tmp_path / "train.py", tmp_path / "stop", tmp_path / "events.jsonl"
    program.write_text(TRAIN)
    words = ("--nproc-per-node", "2", "--max-restarts", "1", "--metrics", ":0")
    with start_meshrun(*words, "--events", events, program, stop, folder=tmp_path) as ours:
        url = address(ours)
        ours.wait_for("up", 2)
        wait_until(lambda: 'rank="1"' in ask(f"{url}/metrics")[2], lambda: ours.stderr)
        _, kind, text = ask(f"{url}/metrics")
        _, open_kind, open_text = ask(f"{url}/metrics", "application/openmetrics-text")
        ready, healthy = ask(f"{url}/readyz"), ask(f"{url}/healthz")
        wrong = ask(f"{url}/nothing")[0]
        if shutil.which("curl"):
            subprocess.run(["curl", "-fsS", f"{url}/readyz"], check=True, capture_output=True)
        stop.touch()
        assert ours.wait() == 0

    assert "127.0.0.1" in url
    assert kind.startswith("text/plain; version=0.0.4")
    assert open_kind.startswith("application/openmetrics-text")
    assert open_text.endswith("# EOF\n")
    for line in (
        'meshrun_restarts_total{reason="ValueError"} 1', "meshrun_generation 1",
        'meshrun_ranks{state="running"} 2', "meshrun_step 7", 'meshrun_rank_step{rank="1"} 7',
    ):  # fmt: skip
        assert f"\n{line}\n" in text
        assert f"\n{line}\n" in open_text
    assert (ready[0], ready[2], healthy[0], wrong) == (
        200, "2 of 2 ranks running the program\n", 200, 404,
    )  # fmt: skip
    written = read_events(events.read_text())
    names = [line["event"] for line in written]
    assert [names[0], names[-1]] == ["launch_started", "launch_ended"]
    assert names.count("rank_started") == names.count("rank_ended") == 4
    assert {"rank_failed", "restarted", "progress", "rank_ready"} <= set(names)
    (failed,) = (line for line in written if line["event"] == "rank_failed")
    assert (failed["rank"], failed["exception"], failed["generation"]) == (1, "ValueError", 0)
    assert written[-1]["generation"] == 1


def test_lines_and_events_as_json(fake_torch: object, tmp_path: Path) -> None:
    """Every printed line is an object, including events on stdout."""
    program = tmp_path / "fail.py"
    program.write_text(
        "import os, sys, time\n"
        "print('one\\n\\x1b[1mtwo', flush=True)\nprint('bar\\rdone', file=sys.stderr)\n"
        "open(f'{sys.argv[0]}.{os.environ[\"RANK\"]}', 'x').close()\n"
        "while not os.path.exists(f'{sys.argv[0]}.0'):\n    time.sleep(0.01)\n"
        "if os.environ['RANK'] == '1':\n    sys.exit(3)\n"
    )
    words = ("--nproc-per-node", "2", "--log-format", "json", "--events", "-")
    ours = run_meshrun(*words, program)

    assert ours.returncode == 3
    errors = [json.loads(line) for line in ours.stderr.splitlines()]
    lines = [json.loads(line) for line in ours.stdout.splitlines()]
    printed = [line for line in lines if line.get("source") == "rank"]
    assert {(line["rank"], line["stream"], line["message"]) for line in printed} == {
        (rank, "stdout", text) for rank in (0, 1) for text in ("one", "\x1b[1mtwo")
    }
    assert {line["message"] for line in errors if line["source"] == "rank"} == {"done"}
    assert "error: rank 1 exited with code 3" in errors[-1]["message"]
    assert (errors[-1]["source"], errors[-1]["level"]) == ("meshrun", "error")
    events = [line for line in lines if "event" in line]
    assert read_events("\n".join(map(json.dumps, events)))[-1]["exit_code"] == 3


def test_nothing_starts_without_the_port_or_the_file(fake_torch: object, tmp_path: Path) -> None:
    """The error names it."""
    program = tmp_path / "never.py"
    program.write_text("print('started')")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        in_use = run_meshrun("--metrics", f":{port}", program)
    no_folder = run_meshrun("--events", tmp_path / "none" / "events", program)
    unclear = run_meshrun("--metrics", "somewhere", program)

    assert [ours.stdout for ours in (in_use, no_folder, unclear)] == ["", "", ""]
    assert f"error: --metrics: port {port} on 127.0.0.1 is in use" in in_use.stderr
    assert f"error: --events: folder `{tmp_path / 'none'}` does not exist" in no_folder.stderr
    assert "--metrics expects [HOST]:PORT, found `somewhere`" in unclear.stderr


def test_a_full_pipe_drops_whole_events() -> None:
    """Its reader gets complete lines later, and one message says that events are lost."""
    messages: list[str] = []
    reader, writer = os.pipe2(os.O_NONBLOCK)
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 8192)
    lines, got = WholeLines(writer, "pipe", messages.append), b""
    for begin in range(0, 20, 5):
        for number in range(begin, begin + 5):
            lines.write(json.dumps({"number": number, "text": "x" * 6000}))
        got += os.read(reader, 65536)
    os.close(writer)
    os.close(reader)

    *whole, _rest = got.decode().split("\n")
    assert [json.loads(line)["number"] for line in whole][:2] == [0, 1]
    assert len(whole) > 3
    assert len(messages) == 1
    assert messages[0].endswith("; events are lost")


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_prometheus_reads_the_metrics(fake_torch: object, tmp_path: Path) -> None:
    """A real server scrapes them and answers a query."""
    program, stop = tmp_path / "train.py", tmp_path / "stop"
    program.write_text(TRAIN)
    words = ("--nproc-per-node", "2", "--max-restarts", "1", "--metrics", ":0")
    with start_meshrun(*words, program, stop, folder=tmp_path) as ours:
        target = address(ours).removeprefix("http://")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [{"job_name": "m", "static_configs": [{"targets": [target]}]}],
        }
        (tmp_path / "prometheus.yml").write_text(json.dumps(config))
        server = subprocess.Popen(
            ["prometheus", f"--config.file={tmp_path}/prometheus.yml",
             f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        query = f"http://127.0.0.1:{port}/api/v1/query?query=meshrun_rank_step"

        def answers() -> bool:
            try:
                return '"rank":"1"' in ask(query)[2]
            except OSError:
                return False

        try:
            wait_until(answers, lambda: "an answer from Prometheus")
        finally:
            server.kill()
            server.wait()
        stop.touch()
        assert ours.wait() == 0
