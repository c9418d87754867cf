"""Values that others write to torch's store during rendezvous: a clear error, never executed."""

from __future__ import annotations

import os
import pickle
from datetime import datetime, timezone
from typing import Any

import pytest

from meshrun.errors import RendezvousError
from meshrun.protocol.packing import pack
from meshrun.protocol.zygote_messages import NodeInfo
from meshrun.rendezvous.torch_backend import read_info
from meshrun.rendezvous.torch_handler import PickleFilter

pytestmark = pytest.mark.torch
INFO = NodeInfo(host="node0", address="127.0.0.1", port=1, secret="drawn")
TEXT = pack(INFO)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{}", b"\xff", b"[" * 9999,
        TEXT.replace(b"127.0.0.1", b"a name"),
        TEXT.replace(b'"port": 1', b'"port": 70000'),
        TEXT.replace(b"drawn", b"x" * 999),
    ],
    ids=["empty", "no fields", "not text", "deep", "no address", "no port", "long secret"],
)  # fmt: skip
def test_invalid_node_info_is_an_error(text: bytes) -> None:
    """Valid info is accepted."""
    assert read_info(TEXT, "0") == INFO
    with pytest.raises(RendezvousError, match="under `0`, expected a node's address"):
        read_info(text, "0")


class Runs:
    """A pickle that would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/nobody/makes/this",)


def test_torchs_rendezvous_reads_its_own_state_and_runs_nothing() -> None:
    """A pickle of anything else raises PickleError, which torch handles."""
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
