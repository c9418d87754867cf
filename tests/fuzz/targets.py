"""The fuzz targets: each accepts any bytes, and raises only on a bug."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from unittest import mock

from meshrun.cli.options import Options
from meshrun.cli.read import build_request, check_other_options
from meshrun.errors import MeshrunError
from meshrun.layout import Layout
from meshrun.layout.derived import parse_flatten, parse_view
from meshrun.layout.selection import select_ranks
from meshrun.layout.spec import parse_mesh
from meshrun.mesh.current import layout_of
from meshrun.mesh.current_layout import current_layout, data_shard
from meshrun.plan.group_options import read_group_options
from meshrun.plan.rank_program import Program
from meshrun.protocol import codec
from meshrun.protocol.stacks import merge, parse_dump
from meshrun.rendezvous import messages
from meshrun.rendezvous.frames import FrameError, FrameReader, FrameWriter
from meshrun.rendezvous.handshake import CoordinatorHandshake, HandshakeError, ParticipantHandshake

_LAYOUT = Layout.parse("pp=2,dp=2,tp=4", nnodes=2)
_VARIABLES = (
    *("MESHRUN_MESH", "MESHRUN_FLATTEN", "MESHRUN_VIEW", "MESHRUN_DATA_DIMS", "MESHRUN_DEVICE"),
    *("MESHRUN_NPROC_PER_NODE", "MESHRUN_GENERATION", "MESHRUN_BACKEND", "MESHRUN_TIMEOUT"),
    *("MESHRUN_PG_OPT", "MESHRUN_SLOT_ORDER", "TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"),
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    "MESHRUN_NODES_PER_DOMAIN",
)
_REPEATED = (
    *("flatten", "view", "intra_node", "intra_domain", "backend", "timeout", "pg_opt"),
    *("show", "hide"),
)


_OPTIONS = tuple(row.name for row in Options.rows() if row.variable)


def spec(data: bytes) -> None:
    """Parse texts that describe a mesh and its ranks."""
    text, _, names = data.decode(errors="replace").partition("\n")
    for parse in (parse_flatten, parse_view, lambda text: select_ranks(_LAYOUT, text)):
        _ask(lambda parse=parse: parse(text))
    found = _ask(lambda: parse_mesh(text, names or None))
    if found is not None:
        assert parse_mesh(str(found)) == found
    _ask(lambda: Layout.parse(text, nproc_per_node=8, flatten=names, views=names))


def frames(data: bytes) -> None:
    """Decode packets of the control sockets, and parse stacks that ranks write."""
    try:
        message = codec.decode(data)
    except codec.WireError:
        pass
    else:
        codec.decode(codec.encode(message))
    dump = parse_dump(data.decode(errors="replace"))
    if dump is not None:
        merge({0: dump, 1: dump})


def peers(data: bytes) -> None:
    """Decode what a launcher receives from the network: lines, frames and messages."""
    first, _, rest = data.partition(b"\n")
    for take in (CoordinatorHandshake(b"s").answer, ParticipantHandshake(b"s").answer):
        with suppress(HandshakeError):
            take(first)
    reader = FrameReader(b"s", "participant")
    with suppress(FrameError):
        assert reader.feed(first) == []
        assert reader.feed(rest) == []
    assert FrameReader(b"s", "a").feed(FrameWriter(b"s", "a").frame(data)) == [data]
    with suppress(messages.MessageError, RecursionError):
        message = messages.decode(data)
        text = messages.encode(message)
        assert messages.encode(messages.decode(text)) == text
        messages.decode(text, ahead_ns=1)


def environment(data: bytes) -> None:
    """Read variables of a rank, and options."""
    values = _pairs(data, _VARIABLES)
    with mock.patch.dict(os.environ, values):
        for read in (current_layout, partial(read_group_options, os.environ), data_shard):
            _ask(read)
        _ask(lambda: layout_of("dp=-1", None))
    options = _pairs(data, _OPTIONS)
    asked = Options(
        {name: [text] if name in _REPEATED else text for name, text in options.items()}, {}, {}
    )
    program = Program(kind="script", target="train.py")
    _ask(lambda: (check_other_options(asked), build_request(asked, program)))


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (spec, frames, peers, environment)
}
SEEDS: dict[str, tuple[bytes, ...]] = {
    "spec": (b"dp=2,tp=4", b"2x4\ndp,tp", b"dp=2:8,tp=-1", b"moe:pp=2,ep=-1", b"dp_cp=dp+cp",
             b"rank=0-3,5", b"dp=0,tp=1-3"),
    "frames": (b'["RankExited", {"rank": 0, "pid": 1, "wait_status": 0, "at_ns": 1}]',
               b'["Exit", {"grace_s": 2.0}]',
               b'["RankBeat", {"rank": 0, "at_ns": 1, "step": 7}]',
               b'Current thread 0x0000 (most recent call first):\n  File "a.py", line 3 in f\n',
               b"Fatal Python error: Segmentation fault\n\nThread 0x01:\n  File \"b\", line 1\n"),
    "peers": (b'{"meshrun": 1, "nonce": "00"}\n{"nonce": "00", "proof": "00"}\n\0\0\0\1',
              b'["Join", {"host": "a", "node_rank": null, "nproc": 1, "settings": {"a": "2"}}]',
              b'["Failed", {"generation": 0, "outcome": {"ranks": {"0": {"at_ns": 1}}}}]'),
    "environment": (b"\x00dp=2,tp=4\n\x0c3\n\x0d8", b"\x058,4\n\x0d12", b"\x02tp=90s", b"\x0112"),
}  # fmt: skip


def _pairs(data: bytes, names: tuple[str, ...]) -> dict[str, str]:
    """Return names and values from lines: a byte that selects a name, then its value."""
    lines = [line for line in data.replace(b"\0\0", b"").split(b"\n") if line]
    return {
        names[line[0] % len(names)]: line[1:].replace(b"\0", b"").decode(errors="replace")
        for line in lines[:8]
    }


def _ask(ask: Callable[[], object]) -> object:
    try:
        return ask()
    except MeshrunError as error:
        assert error.message
        return None
