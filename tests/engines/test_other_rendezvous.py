"""Nodes that meet through etcd, or through a back end that a package provides."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines.hosts import Hosts, MakeHosts
from tests.engines.together import Launch, all_gone, as_shell, end_all, launch_on, rank_lines
from tests.kit import PROGRAMS, wait_until, withdrew

pytestmark = pytest.mark.torch
SAYS = PROGRAMS / "nodes.py"
MESH = ("--mesh", "dp=2,tp=2")
PLUGIN = '''
from datetime import timedelta
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
import os

class Mine(C10dRendezvousBackend):
    name = "mine"

def make(params):
    """Meet as c10d does, on its own store."""
    print("through the plug-in", flush=True)
    host, _, port = params.endpoint.rpartition(":")
    store = TCPStore(host, int(port), is_master=os.uname().nodename == "node0",
                     timeout=timedelta(seconds=60), wait_for_workers=False, multi_tenant=True)
    return create_handler(store, Mine(store, params.run_id), params)
'''


@pytest.fixture
def hosts_and_etcd(make_hosts: MakeHosts, tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts; on the first, etcd serves its v2 API."""
    if shutil.which("etcd") is None or find_spec("etcd") is None:
        pytest.skip("etcd needs the program etcd and the package python-etcd")
    hosts = make_hosts(2)
    place = f"http://{hosts.addresses[0]}:2379"
    words = ["etcd", "--enable-v2", "--data-dir", tmp_path / "etcd"]
    words += ["--listen-client-urls", place, "--advertise-client-urls", place]
    with open(tmp_path / "etcd.log", "wb") as log:
        server = hosts.popen(0, words, stdout=log, stderr=log, env={"ETCD_UNSUPPORTED_ARCH": ""})
    try:
        written = tmp_path / "etcd.log"
        wait_until(lambda: b"ready to serve" in written.read_bytes(), written.read_text)
        yield hosts
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("backend", ["etcd", pytest.param("etcd-v2", marks=pytest.mark.nightly)])
def test_nodes_meet_through_etcd(hosts_and_etcd: Hosts, backend: str) -> None:
    """A real etcd; the host names decide which node is the coordinator."""
    hosts = hosts_and_etcd
    launches = launch_on(
        hosts, "--nnodes", "2", "--rdzv-backend", backend, "--rdzv-id", "j",
        "--rdzv-endpoint", f"{hosts.addresses[0]}:2379", *MESH, SAYS,
    )  # fmt: skip

    assert end_all(launches) == [0, 0], launches[0].text + launches[1].text
    assert [rank_lines(launch.text)[0][:22] for launch in launches] == [
        "rank 0 of 4 on node0: ",
        "rank 2 of 4 on node1: ",
    ]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            None,
            "hint: check that etcd is running at 10.77.0.1:2379, and that this node can reach it",
        ),
        ("raise ImportError('none here')", "pip install python-etcd"),
    ],
    ids=["no server", "no package"],
)
def test_a_missing_etcd_is_reported(
    make_hosts: MakeHosts, tmp_path: Path, module: str | None, message: str
) -> None:
    """The error does not suggest that other nodes have a different --rdzv-id."""
    if module is None and find_spec("etcd") is None:
        pytest.skip("needs the package python-etcd")
    if module is not None:
        (tmp_path / "etcd.py").write_text(module)
    hosts = make_hosts(1)
    (launch,) = launch_on(
        hosts, "--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-id", "j",
        "--rdzv-endpoint", "10.77.0.1:2379", *MESH, SAYS, env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip

    assert launch.end() == 69
    assert message in launch.text
    assert launch.text.splitlines()[-1].startswith("error: etcd at "), launch.text


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("backend", "how"),
    [
        ("etcd", "no program"),
        pytest.param("etcd", "SIGINT", marks=pytest.mark.nightly),
        pytest.param("etcd-v2", "no program", marks=pytest.mark.nightly),
        pytest.param("etcd-v2", "unknown option", marks=pytest.mark.nightly),
    ],
)
def test_a_node_that_gives_up_is_reported_through_etcd(
    hosts_and_etcd: Hosts, backend: str, how: str
) -> None:
    """Through the store, while torch's rendezvous waits; the second time, despite an old report."""
    hosts = hosts_and_etcd
    words = ["--nnodes", "3", "--rdzv-backend", backend, "--rdzv-id", "j", "--rdzv-endpoint",
             f"{hosts.addresses[0]}:2379", "--mesh", "dp=3,tp=2",
             "--node-timeout", "12"]  # fmt: skip
    for _ in range(2):
        first = Launch(hosts, 0, [*words, SAYS])
        first.wait_for("waiting for 3 nodes through")
        if how == "SIGINT":
            second = Launch(hosts, 1, [*words, SAYS])
            second.wait_for("waiting for 3 nodes through")
            second.send(signal.SIGINT)
        elif how == "no program":
            second = Launch(hosts, 1, [*words, "lost.py"])
        else:
            second = Launch(hosts, 1, ["--mish", "2", *words, SAYS])
        codes = [as_shell(each.end()) for each in (first, second)]

        assert codes[0] == codes[1] == {"SIGINT": 130}.get(how, codes[1]), first.text + second.text
        assert f"error: {withdrew('node1')}" in first.text
    wait_until(lambda: not hosts.processes(1), lambda: str(hosts.processes(1)))


@pytest.mark.nightly
def test_nodes_meet_through_a_plug_in(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """From the entry points that torchrun uses."""
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torchrun.handlers]\nmine = mine:handler\n")
    (tmp_path / "mine.py").write_text(PLUGIN + "\n\ndef handler():\n    return make\n")
    hosts = make_hosts(2)
    launches = launch_on(
        hosts, "--nnodes", "2", "--rdzv-backend", "mine", "--rdzv-id", "j",
        "--rdzv-endpoint", "10.77.0.1:29501", *MESH, SAYS, env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip

    assert end_all(launches) == [0, 0], launches[0].text + launches[1].text
    assert "through the plug-in" in launches[0].text
    assert sorted(rank_lines(launches[0].text + launches[1].text))[3][:11] == "rank 3 of 4"
    all_gone(hosts)


@pytest.mark.nightly
def test_an_unknown_back_end_is_reported(make_hosts: MakeHosts) -> None:
    """Before anything starts."""
    hosts = make_hosts(1)
    (launch,) = launch_on(
        hosts,
        "--nnodes",
        "2",
        "--rdzv-backend",
        "mine",
        "--rdzv-endpoint",
        "a:1",
        "--node-timeout",
        "3",
        *MESH,
        SAYS,
    )

    assert launch.end() == 2
    assert "unknown backend `mine`" in launch.text


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_a_node_leaves_and_is_started_again(
    hosts_and_etcd: Hosts, backend: str, tmp_path: Path
) -> None:
    """It finds the launch that continues without it and does not start a new one."""
    hosts = hosts_and_etcd
    words = (
        "--nnodes", "1:2", "--rdzv-backend", backend, "--rdzv-id", "j", "--rdzv-endpoint",
        f"{hosts.addresses[0]}:2379", "--mesh", "dp=1:2", "--nproc-per-node", "1",
        PROGRAMS / "elastic.py", tmp_path,
    )  # fmt: skip
    launches = launch_on(hosts, *words)
    for launch in launches:
        launch.wait_for("in 0 on")
    launches[1].process.kill()
    launches[0].wait_for("generation 1 runs without node1")
    launches[1] = Launch(hosts, 1, words)
    launches[0].wait_for("generation 2 runs with node1")
    (tmp_path / "go").touch()

    assert end_all(launches) == [0, 0], launches[0].text + launches[1].text
    wait_until(lambda: not hosts.processes(1), lambda: str(hosts.processes(1)))
