"""A launcher on each of several hosts: they meet, report who is missing, and stop together."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.engines.hosts import MakeHosts
from tests.engines.together import Launch, all_gone, end_all, launch_on, rank_lines, wait_for_all
from tests.kit import HUNG_UP, PROGRAMS, SILENT, lost_node, wait_until
from tests.schedulers import variables

pytestmark = pytest.mark.torch
SAYS = PROGRAMS / "nodes.py"
PRINTS = PROGRAMS / "environment.py"
TOGETHER = PROGRAMS / "together.py"
MESH = ("--mesh", "dp=2,tp=2")
TWO = ("--nnodes", "2", "--rdzv-endpoint", "node0:29500")
AT = (*TWO, *MESH)
BARE = (*TWO, "--nproc-per-node", "2")
"""Without a mesh, so that launchers need no torch."""
STARTED = [
    variables(
        "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=node[1,9] SLURM_STEP_NUM_NODES=2"
        " SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_PROCID=0 SLURM_NODEID=0"
    ),
    {"JOB_COMPLETION_INDEX": "0"},
]
"""The first of two nodes, where a scheduler starts the launchers."""


@pytest.mark.parametrize(
    ("own_name", "how"),
    [
        pytest.param("address", ["--rdzv-endpoint", "node0:29500"], marks=pytest.mark.nightly),
        ("loopback", ["--rdzv-endpoint", "node0:29500"]),
        pytest.param("loopback", ["--rdzv-endpoint", "10.77.0.1:29500"], marks=pytest.mark.nightly),
        (
            "loopback",
            ["--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29500", "--rdzv-id", "j"],
        ),
        ("address", ["--master-addr", "node0", "--master-port", "29500"]),
    ],
    ids=["name", "name-debian", "address", "c10d", "static"],
)
def test_nodes_meet(make_hosts: MakeHosts, how: list[str], own_name: str) -> None:
    """By name or address, even if a host's own name resolves to loopback, as on Debian."""
    hosts = make_hosts(2, own_name=own_name)
    static = "--master-addr" in how
    launches = launch_on(
        hosts, "--nnodes", "2", *how, *MESH, SAYS,
        each=lambda host: ["--node-rank", str(host)] if static else [],
    )  # fmt: skip

    assert end_all(launches) == [0, 0], launches[0].text + launches[1].text
    assert rank_lines(launches[0].text) == [
        "rank 0 of 4 on node0: dp 0 tp 0, sum 6",
        "rank 1 of 4 on node0: dp 0 tp 1, sum 6",
    ]
    assert rank_lines(launches[1].text) == [
        "rank 2 of 4 on node1: dp 1 tp 0, sum 6",
        "rank 3 of 4 on node1: dp 1 tp 1, sum 6",
    ]
    all_gone(hosts)


@pytest.mark.nightly
def test_a_node_without_ranks_ends_with_the_others(make_hosts: MakeHosts) -> None:
    """The third node of the domain has only half a tp group, so it gets no ranks."""
    hosts = make_hosts(3)
    launches = launch_on(
        hosts, "--nnodes", "3", "--rdzv-endpoint", "node0:29500", "--mesh", "dp=-1,tp=2",
        "--nproc-per-node", "1", "--domain-size", "3", "--intra-domain", "tp", SAYS,
    )  # fmt: skip

    assert end_all(launches) == [0, 0, 0], launches[0].text + launches[2].text
    assert [rank_lines(launch.text) for launch in launches] == [
        ["rank 0 of 2 on node0: dp 0 tp 0, sum 1"],
        ["rank 1 of 2 on node1: dp 0 tp 1, sum 1"],
        [],
    ]
    all_gone(hosts)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_names_do_not_matter_where_an_address_is_given(make_hosts: MakeHosts, backend: str) -> None:
    """No host name resolves."""
    hosts = make_hosts(2, own_name="nothing")
    launches = launch_on(
        hosts, "--nnodes", "2", "--rdzv-backend", backend, "--rdzv-endpoint", "10.77.0.1:29500",
        *MESH, SAYS,
    )  # fmt: skip

    assert end_all(launches) == [0, 0], launches[0].text + launches[1].text


@pytest.mark.parametrize("backend", [pytest.param("static", marks=pytest.mark.nightly), "c10d"])
@pytest.mark.parametrize("form", ["[{0}]:29500", "{0}:29500", "[{1}%eth0]:29500"])
def test_nodes_meet_over_ipv6(make_hosts: MakeHosts, backend: str, form: str) -> None:
    """The endpoint is an IPv6 address, possibly link-local or without brackets."""
    hosts = make_hosts(2, ipv6=True)
    show = ["ip", "-6", "addr", "show", "dev", "eth0", "scope", "link", "-tentative"]
    wait_until(lambda: "inet6 " in hosts.run(0, show).stdout, lambda: "no link-local address")
    link_local = hosts.run(0, show).stdout.partition("inet6 ")[2].partition("/")[0]
    endpoint = form.format(hosts.addresses_v6[0], link_local)
    launches = launch_on(
        hosts, "--nnodes", "2", "--rdzv-backend", backend, "--rdzv-endpoint", endpoint, *MESH, SAYS
    )

    assert end_all(launches) == [0, 0], launches[0].text + launches[1].text


@pytest.mark.nightly
def test_nodes_without_node_ranks_are_numbered_by_name(make_hosts: MakeHosts) -> None:
    """node2 sorts before node10, whichever joined first; the coordinator is node 0."""
    hosts = make_hosts(3)
    launches = launch_on(
        hosts, "--nnodes", "3", "--rdzv-endpoint", "node1:29500", "--mesh", "dp=3", SAYS
    )

    assert end_all(launches) == [0, 0, 0]
    assert [rank_lines(launch.text) for launch in launches] == [
        ["rank 1 of 3 on node0: dp 1, sum 3"],
        ["rank 0 of 3 on node1: dp 0, sum 3"],
        ["rank 2 of 3 on node2: dp 2, sum 3"],
    ]


@pytest.mark.nightly
def test_ranks_of_a_role_are_numbered_across_nodes(make_hosts: MakeHosts, fake_torch: Path) -> None:
    """As torchrun numbers them, if nodes differ in role and number of workers."""
    hosts = make_hosts(3)
    nodes = [("trainer", "2"), ("reader", "1"), ("trainer", "3")]
    launches = launch_on(
        hosts, "--nnodes", "3", "--rdzv-endpoint", "node0:29500", "--no-prefix",
        PROGRAMS / "environment.py",
        each=lambda host: [
            "--node-rank", str(host), "--role", nodes[host][0], "--nproc-per-node", nodes[host][1]
        ],
    )  # fmt: skip
    assert end_all(launches) == [0, 0, 0], launches[0].text + launches[1].text
    lines = (line for launch in launches for line in launch.text.splitlines())
    found = [json.loads(line) for line in lines if line.startswith("{")]
    names = ("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")

    assert [
        tuple(each[name] for name in names) for each in sorted(found, key=lambda e: int(e["RANK"]))
    ] == [
        ("trainer", "0", "5"), ("trainer", "1", "5"), ("reader", "0", "1"),
        ("trainer", "2", "5"), ("trainer", "3", "5"), ("trainer", "4", "5"),
    ]  # fmt: skip


@pytest.mark.nightly
def test_the_first_node_shows_the_command_for_the_others(
    make_hosts: MakeHosts, fake_torch: Path
) -> None:
    """Given only the number of nodes, it prints a command that makes the others join.

    If a scheduler starts the others, it prints none.
    """
    hosts = make_hosts(3)
    words = ("--nnodes", "2", *MESH, SAYS)
    first = Launch(hosts, 0, words)
    of_schedulers = [Launch(hosts, host, words, env=env) for host, env in enumerate(STARTED, 1)]
    first.wait_for("run on every other node: ")
    shown = first.text.partition("run on every other node: ")[2].splitlines()[0]

    assert shown.startswith("meshrun --rdzv-endpoint 10.77.0.1:29500 --nnodes 2 --mesh dp=2,tp=2")
    assert "1 of 2 nodes joined; missing: node 1" in first.text
    for launch in (first, *of_schedulers):
        launch.wait_for("waiting at ")
        launch.send(signal.SIGTERM)
        launch.end()
    assert not any("run on every other node" in launch.text for launch in of_schedulers)


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_node_that_never_joins_is_reported(
    make_hosts: MakeHosts, backend: str, request: pytest.FixtureRequest
) -> None:
    """While waiting and at the end, with likely causes."""
    if backend == "static":
        request.getfixturevalue("fake_torch")
    hosts = make_hosts(1)
    (launch,) = launch_on(
        hosts, "--rdzv-backend", backend, "--rdzv-conf", "join_timeout=5", *AT, SAYS
    )

    assert launch.end() == 69
    assert re.search(r"1 of 2 nodes joined.* \(\d of 5 s\)", launch.text), launch.text
    assert "hint: " in launch.text
    assert launch.text.splitlines()[-1].startswith("error: "), launch.text
    all_gone(hosts)


@pytest.mark.nightly
def test_a_missing_coordinator_is_reported(make_hosts: MakeHosts, fake_torch: Path) -> None:
    """The other node reports where it waits and why it cannot connect."""
    hosts = make_hosts(2)
    launch = launch_on(hosts, "--rdzv-conf", "join_timeout=5", *AT, SAYS, each=_only(1))[1]

    assert launch.end() == 69
    assert "waiting for node 0 at node0:29500: " in launch.text
    assert "Connection refused" in launch.text


def _only(host: int):  # type: ignore[no-untyped-def]
    """Return arguments that make the launchers on other hosts do nothing."""
    return lambda each: [] if each == host else ["--version"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (["--mesh", "dp=4"], "--mesh is dp=4 on node1, but dp=2,tp=2 on node0"),
        ([*MESH, "--max-restarts", "1"], "--max-restarts is 1 on node1"),
        ([*MESH, "--nnodes", "4", "--nproc-per-node", "1"], "--nnodes is 4 on node1"),
        ([*MESH, "--backend", "gloo"], "--backend is gloo on node1"),
    ],
)
def test_a_difference_is_reported_before_any_rank(
    make_hosts: MakeHosts, other: list[str], message: str, fake_torch: Path
) -> None:
    """Both nodes name the node and the option, and start nothing."""
    hosts = make_hosts(2)
    launches = launch_on(
        hosts, SAYS,
        each=lambda host: ["--nnodes", "2", "--rdzv-endpoint", "node0:29500",
                           *(other if host else MESH)],
    )  # fmt: skip

    assert end_all(launches) == [2, 2], launches[0].text + launches[1].text
    for launch in launches:
        assert message in launch.text
        assert "rank " not in launch.text


FILE = "the file of the program is"


@pytest.mark.usefixtures("fake_torch")
@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (["a/loop.py", "2"], ["b/loop.py", "2"], f"{FILE} b/loop.py (sha256 "),
        (["-m", "a.loop"], ["-m", "b.loop"], "the program is -m b.loop on node1, but -m a.loop on"),
    ],
    ids=["content", "module"],
)
def test_another_program_is_reported_before_any_rank(
    make_hosts: MakeHosts, tmp_path: Path, first: list[str], second: list[str], message: str
) -> None:  # fmt: skip
    """Both nodes name the node and the difference."""
    for name, text in (("loop.py", ""), ("a/loop.py", ""), ("b/loop.py", "\n")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    hosts = make_hosts(2)
    launches = [Launch(hosts, host, [*AT, *words], cwd=tmp_path)
                for host, words in enumerate((first, second))]  # fmt: skip

    assert end_all(launches) == [2, 2], launches[0].text + launches[1].text
    for launch in launches:
        assert message in launch.text
        assert "--allow-different-programs" in launch.text


@pytest.mark.usefixtures("fake_torch")
def test_arguments_may_differ_with_a_note(make_hosts: MakeHosts) -> None:
    """Only node 0 prints the note, which names the first node that differs."""
    hosts = make_hosts(3)
    words = ["--nnodes", "3", "--rdzv-endpoint", "node0:29500", "--nproc-per-node", "1"]
    launches = [Launch(hosts, host, [*words, PRINTS, f"/scratch/{host}"]) for host in range(3)]

    assert end_all(launches) == [0, 0, 0], launches[0].text + launches[1].text
    note = r"argument 1 of the program is `/scratch/\d` on node[12], but `/scratch/0` on node0"
    assert [len(re.findall(note, launch.text)) for launch in launches] == [1, 0, 0]


@pytest.mark.nightly
def test_different_programs_run_where_they_are_meant_to(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    """The same file in another place needs no option; a different file needs one on any node."""
    copied = tmp_path / "as" / "main.py"
    copied.parent.mkdir()
    copied.write_text(SAYS.read_text())
    hosts = make_hosts(3)
    other = tmp_path / "other.py"
    other.write_text(SAYS.read_text() + "\n")
    words = ["--nnodes", "3", "--rdzv-endpoint", "node0:29500", "--mesh", "dp=3"]
    programs = [[SAYS], [copied], ["--allow-different-programs", other, "more"]]
    launches = [Launch(hosts, host, [*words, *each]) for host, each in enumerate(programs)]

    assert end_all(launches) == [0, 0, 0], launches[0].text + launches[2].text


@pytest.mark.nightly
def test_two_nodes_with_one_node_rank_are_reported(make_hosts: MakeHosts, fake_torch: Path) -> None:
    """With both names and the number."""
    hosts = make_hosts(3)
    launches = launch_on(
        hosts, "--nnodes", "3", "--rdzv-endpoint", "node0:29500", "--mesh", "dp=3", SAYS,
        each=lambda host: ["--node-rank", str(min(host, 1))],
    )  # fmt: skip

    assert end_all(launches) == [2, 2, 2]
    error = re.search(r"error: (node\d) and (node\d) both have --node-rank 1", launches[0].text)
    assert error is not None, launches[0].text
    assert set(error.groups()) == {"node1", "node2"}


def test_one_rank_ends_all_nodes_with_one_report(make_hosts: MakeHosts) -> None:
    """The same exit code everywhere; node 0 prints the full report, the others a line."""
    hosts = make_hosts(3)
    launches = launch_on(
        hosts, "--nnodes", "3", "--rdzv-endpoint", "node0:29500", "--mesh", "dp=3,tp=1",
        TOGETHER, "stay", "exit=2:7",
    )  # fmt: skip

    assert end_all(launches) == [7, 7, 7]
    first, *others = (launch.text for launch in launches)
    assert "error: rank 2 [dp2 tp0] exited with code 7" in first
    assert "on node2, pid" in first
    for text in others:
        assert "error: rank 2 [dp2 tp0] on node2 exited with code 7" in text
        assert "node 0 has the full report" in text
    all_gone(hosts)


@pytest.mark.nightly
def test_an_exception_elsewhere_is_shown_in_full_on_the_first_node(make_hosts: MakeHosts) -> None:
    """With its traceback and its host."""
    hosts = make_hosts(2)
    launches = launch_on(hosts, *AT, TOGETHER, "stay", "raise=3")

    assert end_all(launches) == [1, 1]
    assert 'raise ValueError("the loss is nan")' in launches[0].text
    assert (
        launches[0]
        .text.rstrip()
        .splitlines()[-2]
        .startswith("error: rank 3 [dp1 tp1] raised ValueError: the loss is nan")
    )


@pytest.mark.nightly
def test_no_process_outlives_launcher_and_zygote_of_the_first_node(make_hosts: MakeHosts) -> None:
    """Both are killed at once; the store's process is the last guard and kills the rest."""
    hosts, deaf = make_hosts(2), (PROGRAMS / "wait.py", "deaf", "children")
    launches = launch_on(hosts, *AT, "--shutdown-timeout", "1", *deaf)
    wait_for_all(launches, "up", times=2)
    launcher = psutil.Process(launches[0].process.pid)
    for process in (launcher, *launcher.children()):
        process.kill()
    end_all(launches)
    all_gone(hosts)


@pytest.mark.parametrize("host", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_launcher_that_is_killed_ends_the_others(
    make_hosts: MakeHosts, host: int, fake_torch: Path
) -> None:
    """At once, as its connection closes; no process is left on its own host either."""
    hosts = make_hosts(2)
    launches = launch_on(hosts, *BARE, PROGRAMS / "wait.py")
    wait_for_all(launches, "up", times=2)
    os.kill(launches[host].process.pid, signal.SIGKILL)

    other = launches[1 - host]
    assert other.end() == 69
    assert f"error: {lost_node(host)}{HUNG_UP}" in other.text
    all_gone(hosts)


@pytest.mark.parametrize("host", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_node_that_falls_silent_is_lost(
    make_hosts: MakeHosts, host: int, fake_torch: Path
) -> None:
    """Its link is cut: each side exits on its own and names the node it lost."""
    hosts = make_hosts(2)
    launches = launch_on(hosts, *BARE, "--node-timeout", "4", PROGRAMS / "wait.py")
    wait_for_all(launches, "up", times=2)
    hosts.cut(host)

    assert end_all(launches) == [69, 69]
    assert f"{lost_node(1)}{SILENT}" in launches[0].text
    assert f"{lost_node(0)}{SILENT}" in launches[1].text
    all_gone(hosts)


@pytest.mark.parametrize(
    ("host", "way", "code"),
    [
        (0, "well", 75),
        pytest.param(1, "well", 75, marks=pytest.mark.nightly),
        pytest.param(1, "by the signal", -signal.SIGTERM, marks=pytest.mark.nightly),
    ],
    ids=["the first", "another", "no rank saves"],
)
def test_sigterm_on_one_node_ends_all_alike(
    make_hosts: MakeHosts, host: int, way: str, code: int, fake_torch: Path
) -> None:
    """Every rank of every node saves and exits; the exit code is the same everywhere."""
    hosts = make_hosts(2)
    launches = launch_on(hosts, *BARE, PROGRAMS / "preempted.py", *[way] * 4)
    wait_for_all(launches, "up", times=2)
    launches[host].send(signal.SIGTERM)

    assert end_all(launches) == [code, code], launches[0].text + launches[1].text


@pytest.mark.nightly
@pytest.mark.usefixtures("fake_torch")
@pytest.mark.parametrize("nnodes", ["2", "1:2"])
def test_the_signal_is_named_by_nodes_that_the_first_did_not_wait_for(
    make_hosts: MakeHosts, nnodes: str
) -> None:
    """At the third Ctrl-C it exits, while ranks of another node still ignore the first one."""
    hosts = make_hosts(2)
    where = ("--rdzv-backend", "c10d", "--nnodes", nnodes, "--rdzv-endpoint", "node0:29500")
    ranks = ("--nproc-per-node", "1", "--shutdown-timeout", "5", PROGRAMS / "wait.py", "deaf")
    launches = launch_on(hosts, *where, *ranks)
    wait_for_all(launches, "up")
    for text in ("SIGINT: stopping", "SIGINT again: killing in", "SIGINT again: killing rank"):
        launches[0].send(signal.SIGINT)
        launches[0].wait_for(text)

    assert end_all(launches) == [-signal.SIGINT, 69]
    last = launches[1].text.rstrip().splitlines()[-1]
    assert last.startswith(
        "error: another node was stopped by SIGINT; then node 0 (node0) was lost"
    )
    assert "reconnecting" not in launches[1].text
    all_gone(hosts)


def test_all_nodes_start_again_together(make_hosts: MakeHosts) -> None:
    """After a failure on one of them, in the same generation, with a fresh store."""
    hosts = make_hosts(2)
    launches = launch_on(hosts, *AT, "--max-restarts", "1", TOGETHER, "stay", "once", "raise=3")

    assert end_all(launches) == [0, 0], launches[0].text + launches[1].text
    for launch in launches:
        assert launch.text.partition("generation 1 is running")[2].count("met 4") == 2
        assert "restart 1 of 1, because rank 3 [dp1 tp1] raised ValueError" in launch.text


@pytest.mark.nightly
@pytest.mark.parametrize("how", [["--node-rank", "{}"], [], ["--rdzv-backend", "c10d"]],
                         ids=["node rank", "by name", "c10d"])  # fmt: skip
def test_a_launcher_that_is_started_again_rejoins(make_hosts: MakeHosts, how: list[str]) -> None:
    """By hand or by a scheduler, as after a host crash; it costs a restart."""
    hosts = make_hosts(2)
    words = [*AT, "--max-restarts", "1", TOGETHER, "stay", "once"]

    def start(host: int) -> Launch:
        return Launch(hosts, host, [*(word.format(host) for word in how), *words])

    first, second = start(0), start(1)
    wait_for_all((first, second), "met 4", times=2)
    second.process.kill()
    first.wait_for("1 of 2 nodes joined (node0)")
    again = start(1)

    assert end_all([first, again]) == [0, 0], first.text + again.text
    assert f"restart 1 of 1, because {lost_node(1)}{HUNG_UP}" in first.text
    assert first.text.count("met 4") == 4
    assert again.text.count("met 4") == 2
    second.end()
    all_gone(hosts)


@pytest.mark.nightly
def test_a_launcher_that_is_not_started_again_is_not_waited_for_long(make_hosts: MakeHosts) -> None:
    """The error names the lost node and how long the others waited."""
    hosts = make_hosts(2)
    launches = launch_on(hosts, *AT, "--max-restarts", "1", "--node-timeout", "3", TOGETHER, "stay")
    wait_for_all(launches, "met 4", times=2)
    launches[1].process.kill()

    assert launches[0].end() == 69
    lost = f"error: {lost_node(1)}{HUNG_UP}; after "
    assert lost in launches[0].text
    all_gone(hosts)


@pytest.mark.nightly
def test_sigquit_on_the_coordinator_asks_every_node(make_hosts: MakeHosts) -> None:
    """Each shows its own ranks' stacks and goes on."""
    hosts = make_hosts(2)
    launches = launch_on(hosts, *AT, TOGETHER, "stay")
    wait_for_all(launches, "met 4", times=2)
    launches[0].send(signal.SIGQUIT)
    wait_for_all(launches, "together.py:")
    launches[1].send(signal.SIGINT)

    assert {launch.end() for launch in launches} <= {130, -signal.SIGINT}


@pytest.mark.nightly
def test_nodes_that_wait_for_one_that_works_are_not_hung(make_hosts: MakeHosts) -> None:
    """One node's ranks work while the other's wait for them, for longer than the limit."""
    hosts = make_hosts(2)
    launches = launch_on(hosts, *AT, "--hang-timeout", "3", PROGRAMS / "one_works.py", "8")

    assert end_all(launches) == [0, 0], launches[0].text + launches[1].text


@pytest.mark.nightly
def test_nodes_that_all_wait_are_hung(make_hosts: MakeHosts) -> None:
    """One rank sleeps in its program, the others in a collective; each node shows where."""
    hosts = make_hosts(2)
    launches = launch_on(hosts, *AT, "--hang-timeout", "3", PROGRAMS / "one_works.py", "-1")

    assert end_all(launches) == [124, 124], launches[0].text + launches[1].text
    for launch in launches:
        assert "one_works.py:" in launch.text


@pytest.mark.nightly
@pytest.mark.parametrize(("limit", "code"), [("--hang-timeout", 124), ("--timeout", 1)])
def test_a_hang_across_nodes_names_the_rank(make_hosts: MakeHosts, limit: str, code: int) -> None:
    """One node's ranks wait for a rank of the other; the error names it."""
    hosts = make_hosts(2)
    launches = launch_on(hosts, *AT, limit, "3", PROGRAMS / "late.py")

    assert end_all(launches) == [code, code], launches[0].text + launches[1].text
    late = "in the dp group {1,3}, rank 1 waits in all_reduce #1, which rank 3 has not called"
    assert late in launches[0].text.rpartition("error: ")[2]
