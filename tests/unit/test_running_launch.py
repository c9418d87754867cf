"""A node that starts late finds the running launch through torch's store."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from meshrun.protocol.zygote_messages import Negotiate, NodeInfo
from meshrun.rendezvous.torch_backend import announce_running, find_running


class Texts(dict[str, bytes]):
    """A store with the methods of torch's."""

    def set(self, key: str, text: str) -> None:
        self[key] = text.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def order(port: int, run_id: str = "job") -> Negotiate:
    return Negotiate(
        backend="etcd", endpoint_host="etcd0", endpoint_port=2379, run_id=run_id, least_nodes=1,
        nnodes=4, conf={}, timeout_s=60.0, host="node0", address="127.0.0.1", port=port,
    )  # fmt: skip


def begin(store: Any, port: int) -> None:
    """Announce a launch whose first node listens at ``port``."""
    own = NodeInfo(host="node0", address="127.0.0.1", port=port, secret="drawn")
    announce_running(order(port), store, own)


def test_a_launch_is_found_for_as_long_as_its_first_node_listens() -> None:
    """By its run id; once that node has ended, nodes negotiate again."""
    store: Any = Texts()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert find_running(order(1), store) is None
        begin(store, port)
        found = find_running(order(1), store)
        assert find_running(order(1, "another"), store) is None

    assert found is not None
    assert (found.node_rank, found.nnodes) == (None, 4)
    own = found.coordinator
    assert (own.address, own.port, own.secret) == ("127.0.0.1", port, "drawn")
    assert find_running(order(1), store) is None


@pytest.mark.parametrize("store", [None, Texts({"meshrun/job/running": b"!"})], ids=str)
def test_a_store_without_a_running_launch(store: Any) -> None:
    """A plug-in's store may be of an unknown kind, and others can write to any store."""
    assert find_running(order(1), store) is None
