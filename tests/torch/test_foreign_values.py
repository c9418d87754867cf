"""What others write to torch's store while nodes meet: told plainly, written again, never run."""

from __future__ import annotations

import os
import pickle
import threading
from datetime import datetime, timezone
from typing import Any

import pytest

from meshrun.errors import RendezvousError
from meshrun.host.sockets import listen_on
from meshrun.rendezvous import endpoint_key, store_clock
from meshrun.rendezvous.endpoint_key import EndpointKey
from meshrun.rendezvous.node_info import NodeInfo, read_info
from meshrun.rendezvous.pickle_filter import PickleFilter
from meshrun.rendezvous.store_clock import follow_clock, share_clock
from tests.kit import wait_until

pytestmark = pytest.mark.torch
INFO = NodeInfo(host="node0", is_host=True, address="127.0.0.1", port=1, secret="drawn")
JUNK = ["abc", "nan", "inf", "1e300", "-5e9", "", "\xff"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all that is done every second done every 10 ms."""
    monkeypatch.setattr(store_clock, "_EVERY_S", 0.01)
    monkeypatch.setattr(endpoint_key, "_LOOK_EVERY_S", 0.01)


@pytest.fixture(scope="module")
def store() -> Any:
    """A store of torch's, open to whoever is on this machine."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def part(store: Any, name: str) -> Any:
    """Return a part of the store for one case."""
    from torch.distributed import PrefixStore

    return PrefixStore(name, store)


@pytest.mark.parametrize("junk", JUNK)
def test_a_time_that_is_none_is_told(store: Any, junk: str) -> None:
    """With what was found, and what to look for."""
    ours = part(store, f"time {junk}")
    ours.set("clock", junk)

    with pytest.raises(RendezvousError, match="under `clock`, where the time belongs") as raised:
        follow_clock(ours)
    assert "does something else write to that store" in str(raised.value.hint)


def test_the_time_is_written_again(store: Any) -> None:
    """By its host, who hears that it was another's."""
    ours, changes, done = part(store, "again"), list[str](), threading.Event()
    share_clock(ours, done, changes.append)
    ours.set("clock", "abc")
    wait_until(lambda: changes, lambda: "nothing was noticed")
    follow_clock(ours)
    done.set()

    assert changes[0] == "clock"


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{}", b"\xff", b"[" * 9999,
        INFO.to_text().replace("127.0.0.1", "a name").encode(),
        INFO.to_text().replace('"port": 1', '"port": 70000').encode(),
        INFO.to_text().replace("drawn", "x" * 999).encode(),
    ],
    ids=["nothing", "no card", "no text", "deep", "no address", "no port", "a long secret"],
)  # fmt: skip
def test_a_card_that_is_none_is_told(store: Any, text: bytes) -> None:
    """At the door and where nodes say who they are; one that is one is taken."""
    assert read_info(INFO.to_text().encode(), "0") == INFO
    with pytest.raises(RendezvousError, match="under `0`, where a node's address belongs"):
        read_info(text, "0")
    if text:
        ours = part(store, f"door {text[:99]!r} {len(text)}")
        ours.set("door", text)
        with pytest.raises(RendezvousError, match="under `door`"):
            EndpointKey(ours, nnodes=2).read()


def test_where_the_door_is_is_written_again(store: Any) -> None:
    """By the first node, whoever wrote over it; a node that comes then finds it."""
    ours, changes = part(store, "kept"), list[str]()
    with listen_on("127.0.0.1", 0) as door:
        mine = NodeInfo(
            host="node0", is_host=True, address="127.0.0.1", port=door.getsockname()[1], secret="x"
        )
        assert EndpointKey(ours, nnodes=2).put_up(mine, changes.append) is None
        ours.set("door", "junk")
        wait_until(lambda: changes, lambda: "nothing was noticed")
        late = EndpointKey(ours, nnodes=2).read()

    assert changes[0] == "door"
    assert late is not None
    assert (late.coordinator_port, late.secret) == (mine.port, "x")


class Runs:
    """What a stranger would have run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/nobody/makes/this",)


def test_torchs_rendezvous_reads_its_own_state_and_runs_nothing() -> None:
    """A pickle of anything else is an error of its own kind, which torch knows."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
        _NodeDesc,
        _RendezvousState,
    )

    state, node = _RendezvousState(), _NodeDesc("node0", 1, 0)
    state.participants[node] = 0
    state.wait_list.add(node)
    state.last_heartbeats[node] = state.deadline = datetime.now(timezone.utc)

    assert PickleFilter.loads(PickleFilter.dumps(state)).__dict__ == state.__dict__
    for foreign in (Runs(), {"a": 1}, [Runs(), state], print):
        with pytest.raises(pickle.PickleError):
            PickleFilter.loads(pickle.dumps(foreign))
    for junk in (b"", b"abc", b"\x80\x04."):
        with pytest.raises(pickle.PickleError):
            PickleFilter.loads(junk)
