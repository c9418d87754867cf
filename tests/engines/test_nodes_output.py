"""What several nodes print and write: which lines are shown, and which files each node has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.hosts import MakeHosts
from tests.engines.together import end_all, launch_on
from tests.kit import PROGRAMS

pytestmark = pytest.mark.torch
SAYS = PROGRAMS / "nodes.py"
TOGETHER = PROGRAMS / "together.py"
AT = ("--nnodes", "2", "--rdzv-endpoint", "node0:29500", "--mesh", "dp=2,tp=2")


def lines(text: str) -> list[str]:
    """Return the ranks' lines, sorted."""
    return sorted(line for line in text.splitlines() if "rank " in line and "sum" in line)


@pytest.mark.nightly
def test_only_the_first_nodes_lines_are_printed(make_hosts: MakeHosts) -> None:
    """With --console first-node."""
    launches = launch_on(make_hosts(2), *AT, "--console", "first-node", SAYS)

    assert end_all(launches) == [0, 0], launches[0].text + launches[1].text
    assert lines(launches[0].text) == [
        "[dp0 tp0] rank 0 of 4 on node0: dp 0 tp 0, sum 6",
        "[dp0 tp1] rank 1 of 4 on node0: dp 0 tp 1, sum 6",
    ]
    assert lines(launches[1].text) == []


@pytest.mark.nightly
def test_a_failure_on_a_quiet_node_is_reported_in_full(make_hosts: MakeHosts) -> None:
    """Node 0's report has the traceback, the failing node's console the error."""
    launches = launch_on(make_hosts(2), *AT, "--console", "first-node", TOGETHER, "stay", "raise=3")

    assert end_all(launches) == [1, 1]
    assert 'raise ValueError("the loss is nan")' in launches[0].text
    assert "error: rank 3 [dp1 tp1] on node1 raised ValueError" in launches[1].text


@pytest.mark.nightly
def test_a_line_may_begin_with_its_host(make_hosts: MakeHosts) -> None:
    """With torchrun's option for a template."""
    template = "[${host} ${coordinate}] "
    launches = launch_on(make_hosts(2), *AT, "--log-line-prefix-template", template, SAYS)

    assert end_all(launches) == [0, 0]
    assert lines(launches[1].text)[0] == ("[node1 dp1 tp0] rank 2 of 4 on node1: dp 1 tp 0, sum 6")


@pytest.mark.parametrize("run_id", [None, "job/7"])
def test_nodes_share_a_log_folder(
    make_hosts: MakeHosts, fake_torch: Path, tmp_path: Path, run_id: str | None
) -> None:
    """Each writes to its own folder there, named after the node."""
    logs = tmp_path / "logs"
    named = [] if run_id is None else ["--rdzv-id", run_id]
    words = (*AT[:4], "--nproc-per-node", "2", *named, "-r", "3", "--log-dir", logs)
    launches = launch_on(make_hosts(2), *words, PROGRAMS / "echo.py")

    assert end_all(launches) == [0, 0], launches[0].text + launches[1].text
    folders = sorted(logs.iterdir())
    begin = "" if run_id is None else "job_7_"
    assert len(folders) == 2
    for number, folder in enumerate(folders):
        assert folder.name.startswith(f"{begin}node{number}_")
        for local_rank in (0, 1):
            text = (folder / "attempt_0" / str(local_rank) / "stdout.log").read_text()
            assert text == f"out {2 * number + local_rank}\n"


@pytest.mark.nightly
@pytest.mark.parametrize("code", [0, 7])
def test_nodes_share_a_report(make_hosts: MakeHosts, tmp_path: Path, code: int) -> None:
    """Node 0 writes it for all ranks."""
    report = tmp_path / "report.json"
    program = [SAYS] if not code else [TOGETHER, "stay", f"exit=3:{code}"]
    launches = launch_on(
        make_hosts(2), *program,
        each=lambda host: [*AT, "--report", report if host == 0 else tmp_path / "other.json"],
    )  # fmt: skip

    assert end_all(launches) == [code, code]
    written = json.loads(report.read_text())
    assert written["exit_code"] == code
    assert [each["host"] for each in written["failures"]][:1] == (["node1"] if code else [])
    assert not (tmp_path / "other.json").exists()
