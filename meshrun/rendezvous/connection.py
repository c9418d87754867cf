"""One connection between two launchers: handshake, then messages. Never blocks."""

from __future__ import annotations

import contextlib
import fcntl
import random
import socket
import sys
import termios
from collections import deque
from collections.abc import Callable, Collection, Iterable

from meshrun.host.descriptors import WriteBuffer
from meshrun.host.network import address_of
from meshrun.host.reactor import Reactor
from meshrun.protocol.events import NodeLost
from meshrun.rendezvous.frames import FrameError, FrameReader, FrameWriter
from meshrun.rendezvous.handshake import (
    LONGEST_LINE,
    NO_LAUNCHER,
    CoordinatorHandshake,
    HandshakeError,
    ParticipantHandshake,
    rejection,
)
from meshrun.rendezvous.hub import Hub
from meshrun.rendezvous.messages import Beat, Disconnect, Message, MessageError, decode, encode
from meshrun.rendezvous.node_phases import ConnectionPhase
from meshrun.rendezvous.peer_clock import PeerClock

BEAT_S = 1.0
"""How often each side sends a heartbeat, in a launch of up to 500 nodes."""
_RTO_MAX_MS = 44
"""TCP_RTO_MAX_MS of <netinet/tcp.h> from Linux 6.15 on: the longest delay before a lost packet is
retransmitted."""
_A_DAY_MS = 86_400_000
_CHUNK = 64 * 1024
_NODES_PER_S = 500
"""How many heartbeats the coordinator sends per second at most."""
_LEAST_BEATS = 4
"""How many heartbeats fit into the node timeout at least."""
_SEGMENT = 500
"""Bytes of a long message that are no silence: a slow link carries a segment of TCP at a time."""
_GOODBYE_S = 2.0
_RESUME_S = 5.0
"""How long the participant may take to resume a connection that was reset."""
_SILENT_BEATS = 3
"""After this many missing heartbeats, another launcher may replace one on the same host."""
_CONNECTED = (ConnectionPhase.HANDSHAKE, ConnectionPhase.OPEN)


class Connection:
    """A connected socket, which this object owns.

    Args:
        beat_s: The interval of heartbeats, longer with thousands of nodes.
    """

    def __init__(
        self,
        connection: socket.socket,
        handshake: CoordinatorHandshake | ParticipantHandshake,
        hub: Hub,
        *,
        beat_s: float = BEAT_S,
    ) -> None:
        self._socket, self._hub, self._reactor = connection, hub, hub.reactor
        self._out = WriteBuffer(connection.fileno(), hub.reactor)
        _set_options(connection)
        self._handshake = handshake
        self._line = bytearray()
        self.phase = ConnectionPhase.HANDSHAKE
        self._reader: FrameReader
        self._writer: FrameWriter
        self._waiting: list[Message] = []
        """Those to send after the handshake."""
        self.own_address, self.their_address = _addresses(connection)
        """The addresses at which each side reaches the other."""
        self._on_ready: Callable[[], object] = lambda: None
        self.can_resume = False
        """Whether a reset interrupts it, so that it may be resumed, and does not close it."""
        self.received = 0
        """How many messages have arrived, apart from heartbeats."""
        self._confirmed = 0
        """How many of those sent the peer has received."""
        self._unconfirmed: deque[bytes | None] = deque()
        """Those sent since then; ``None`` for one that was not kept."""
        self._why = "it closed the connection"
        """Why it is closed, or the peer would close it; its Disconnect may give a better reason."""
        self.is_silent = False
        """Whether one side has dropped the other for its silence."""
        self.handshake_error: HandshakeError | None = None
        """Why the peer does not belong to this launch, if it does not."""
        self._began_ns = self.received_ns = hub.now_ns()
        """When it was connected, and when the last message, or a good part of one, arrived, or it
        was reset."""
        self._idle_ns: int | None = None
        self._idle_at_ns = self.received_ns
        """How long the peer's ranks had been idle at which time."""
        self.clock = PeerClock()
        self._interval_ns = int(beat_s * 1e9)
        self._silent_ns = 2 * self._interval_ns
        """The silence after which the peer's state is unknown."""
        self._beats = hub.reactor.call_at(None, self._beat, skips=False)
        hub.connections.add(self)
        if isinstance(handshake, CoordinatorHandshake):
            self._out.write(handshake.greeting)

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def watch(self, on_ready: Callable[[], object]) -> None:
        """Have ``on_ready`` called, from now on, when there is something to receive."""
        self._on_ready = on_ready
        if self.phase in _CONNECTED:
            self._reactor.add_reader(self, on_ready)

    @property
    def is_open(self) -> bool:
        """Whether the handshake is done, and the connection neither interrupted nor closed."""
        return self.phase is ConnectionPhase.OPEN

    @property
    def closed(self) -> str | None:
        """Why nothing more will arrive, once that is so."""
        return self._why if self.phase is ConnectionPhase.CLOSED else None

    @property
    def is_delivered(self) -> bool:
        """Whether the peer's machine has received all that was sent, or the connection is closed.

        A closed socket may not deliver the rest: data from the peer resets it.
        """
        if self.phase not in _CONNECTED or self._out.queued_bytes:
            return self.phase is ConnectionPhase.CLOSED
        try:
            return fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)) == bytes(4)
        except OSError:  # the kernel cannot tell
            return True

    @property
    def age_s(self) -> float:
        """How long ago it was connected, in seconds."""
        return (self._hub.now_ns() - self._began_ns) / 1e9

    @property
    def active_ns(self) -> int | None:
        """When the ranks that the peer reports on last made progress, by our clock.

        The ranks of a silent launcher, which may be suspended, do not count as idle.
        """
        now_ns = self._hub.now_ns()
        if self._idle_ns is not None:
            return max(self._idle_at_ns, now_ns - self._silent_ns) - self._idle_ns
        return now_ns if now_ns - self.received_ns > self._silent_ns else None

    def send(self, message: Message) -> None:
        """Send a message, after the handshake if that is not done yet."""
        if self.phase is ConnectionPhase.HANDSHAKE:
            self._waiting.append(message)
        elif isinstance(message, Beat):
            self._out.write(self._writer.frame(encode(message)))
        else:
            self.send_text(encode(message))

    def send_text(self, text: bytes, *, kept: bool = True) -> None:
        """Send a message that was encoded for many, if the handshake is done.

        Args:
            text: The message.
            kept: Whether to keep it until it is confirmed, to send it again after a reset.
        """
        if self.phase in (ConnectionPhase.OPEN, ConnectionPhase.INTERRUPTED):
            self._unconfirmed.append(text if kept else None)
            self._out.write(self._writer.frame(text))

    def receive(self) -> list[Message]:
        """Return the messages that have arrived, without heartbeats.

        :attr:`closed` may be set after that.
        """
        messages: list[Message] = []
        while self.phase in _CONNECTED:
            try:
                received = self._socket.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError as error:
                # The peer had unread data, or something between the two reset the connection.
                is_reset = isinstance(error, ConnectionError)
                self._interrupt(self._why if is_reset else error.strerror or str(error))
                break
            if not received:
                end = self._interrupt if self._out.is_reset else self.close
                end(self._why)
                break
            try:
                messages += self._read(received)
            except HandshakeError as error:
                self.handshake_error = error
                if isinstance(self._handshake, CoordinatorHandshake):
                    self._out.write(rejection(str(error)))
                self.close(str(error))
            except (FrameError, MessageError) as error:
                self.close(str(error))
            if len(received) < _CHUNK:
                break  # the reactor reports more data, and the end
        return messages

    @property
    def may_be_replaced(self) -> bool:
        """Whether its host may have been cut off, so that a new connection from there replaces it.

        Otherwise, a second launcher was started on that host.
        """
        is_silent = self._hub.now_ns() - self.received_ns > _SILENT_BEATS * self._interval_ns
        return is_silent or self.phase is ConnectionPhase.INTERRUPTED

    def time_out_if_silent(self, timeout_s: float) -> str:
        """Return why to drop a peer that was silent for too long, and send it that; else ""."""
        silent_s = (self._hub.now_ns() - self.received_ns) / 1e9
        if self.phase is ConnectionPhase.INTERRUPTED and silent_s > _RESUME_S:
            return f"its connection was reset and not resumed within {_RESUME_S:g} s"
        if silent_s <= timeout_s:
            return ""
        self.is_silent, why = True, f"no message from it for {silent_s:.0f} s"
        if self.is_open:
            self.send(Disconnect(why=why))
        return why

    def loss(self, node_rank: int, host: str, why: str) -> NodeLost:
        """Return the event that the node at the other end is lost."""
        return NodeLost(
            node_rank=node_rank,
            host=host,
            why=why,
            at_ns=self._hub.now_ns(),
            heard_ns=self.received_ns,
            is_silent=self.is_silent,
        )

    def _beat(self) -> None:
        """Send a heartbeat, and later the next one.

        If they are rare, a participant that knows the coordinator's clock only answers those of the
        coordinator.
        """
        self._beat_after(self._interval_ns)
        answers = self._are_rare and isinstance(self._handshake, ParticipantHandshake)
        if self.is_open and not (answers and self.clock.is_known):
            self._send_beat(self._hub.now_ns())

    def _beat_after(self, wait_ns: int) -> None:
        """Send the next heartbeat; rare ones at a whole second, so that one turn sends many."""
        at_ns = self._hub.now_ns() + wait_ns
        self._beats.move(at_ns + -at_ns % 1_000_000_000 if self._are_rare else at_ns)

    @property
    def _are_rare(self) -> bool:
        """Whether heartbeats have a long interval, as with thousands of nodes."""
        return self._interval_ns > BEAT_S * 1e9

    def _send_beat(self, now_ns: int, echo_ns: int | None = None) -> None:
        idle_s, received = self._hub.reported_idle_s, self.received
        self.send(Beat(at_ns=now_ns, echo_ns=echo_ns, idle_s=idle_s, received=received))

    def _take_beat(self, beat: Beat) -> None:
        now_ns = self._hub.now_ns()
        self._confirm(beat.received)
        if beat.idle_s is not None:
            self._idle_ns, self._idle_at_ns = int(beat.idle_s * 1e9), now_ns
        if beat.echo_ns is None:
            self._send_beat(now_ns, beat.at_ns)
        else:
            self.clock.measure(beat.echo_ns, beat.at_ns, now_ns)

    # ---- interruptions ---------------------------------------------------------------------

    def _interrupt(self, why: str) -> None:
        """Wait for the connection to be resumed, or close it if it cannot be."""
        if self.can_resume:
            self._release()
            self.phase, self.received_ns = ConnectionPhase.INTERRUPTED, self._hub.now_ns()
        else:
            self.close(why)

    def resume(self, other: Connection, received: int) -> None:
        """Continue on the socket of another connection to the same peer, which ends.

        Args:
            other: The new connection, which only served to agree on this.
            received: How many messages the peer has received.
        """
        self._confirm(received)
        self._release()  # the reset may have reached only the peer
        self.phase, self.received_ns = ConnectionPhase.OPEN, other.received_ns
        self._socket, self._out = other._socket, other._out
        self._reader, self._writer = other._reader, other._writer
        self.received += other.received - 1  # all but its Resume or Resumed
        other._leave_hub()
        self._reactor.remove(other)
        self.watch(self._on_ready)
        again, self._unconfirmed = self._unconfirmed, deque()
        for text in again:
            if text is None:
                self.close("its connection was reset, and a message was lost")
                return
            self.send_text(text)

    def _leave_hub(self) -> None:
        self._hub.connections.discard(self)
        self._beats.cancel()

    def _confirm(self, received: int) -> None:
        while self._unconfirmed and self._confirmed < received:
            self._unconfirmed.popleft()
            self._confirmed += 1

    def _release(self) -> None:
        if self.phase in _CONNECTED:  # else another socket may have the descriptor by now
            self._reactor.remove(self)
            self._out.close()
            self._socket.close()

    # ---- end -------------------------------------------------------------------------------

    def end(self, reactor: Reactor, *, is_last: bool) -> None:
        """Write what is left, and wait in another reactor until the peer has read it and closes.

        The last one to end does not tell the peer before that, which would make it close.
        """
        if self.phase in _CONNECTED:
            self._reactor.remove(self)
            self._reactor = reactor
            self.watch(self.receive)
            self._out.move(reactor, (lambda: None) if is_last else self._shut_down)

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self, why: str) -> None:
        """Close the connection; the first reason counts."""
        if self.phase is not ConnectionPhase.CLOSED:
            self._leave_hub()
            self._release()
            self.phase, self._why = ConnectionPhase.CLOSED, why

    def _read(self, received: bytes) -> list[Message]:
        while self.phase is ConnectionPhase.HANDSHAKE:
            self._line += received
            line, newline, rest = self._line.partition(b"\n")
            if not newline:
                if len(self._line) > LONGEST_LINE:
                    raise HandshakeError(NO_LAUNCHER)
                return []
            self._line, received = bytearray(), bytes(rest)
            self._continue_handshake(bytes(line))
        messages: list[Message] = []
        texts = self._reader.feed(received)
        for text in texts:
            message = decode(text, self.clock.ahead_ns)
            if isinstance(message, Beat):
                self._take_beat(message)
                continue
            messages.append(message)
            self.received += 1
            if isinstance(message, Disconnect):
                self.is_silent, self.can_resume = True, False
                self._why = f"it dropped this node: {message.why}"
        if texts or len(received) >= _SEGMENT:
            self.received_ns = self._hub.now_ns()
        return messages

    def _continue_handshake(self, line: bytes) -> None:
        if isinstance(self._handshake, CoordinatorHandshake):
            reply, key = self._handshake.answer(line)
            self._out.write(reply)
            self._open(key, own="coordinator", theirs="participant")
        elif not self._handshake.is_answered:
            self._out.write(self._handshake.answer(line))
        else:
            self._open(self._handshake.finish(line), own="participant", theirs="coordinator")

    def _open(self, key: bytes, *, own: str, theirs: str) -> None:
        self._reader, self._writer = FrameReader(key, theirs), FrameWriter(key, own)
        self.phase = ConnectionPhase.OPEN
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            self.send(message)
        spread_ns = int(random.random() * self._interval_ns)  # noqa: S311 - no secret
        self._beat_after(spread_ns if self._are_rare else 0)


def beat_s(nnodes: int, node_timeout_s: float) -> float:
    """Return the interval of heartbeats, which is longer with many nodes."""
    return max(BEAT_S, min(nnodes / _NODES_PER_S, node_timeout_s / _LEAST_BEATS))


def send_all(connections: Iterable[Connection], message: Message) -> None:
    """Send a message to several peers, encoded once."""
    text = encode(message)
    for connection in connections:
        connection.send_text(text)


def close_gracefully(connections: Collection[Connection], *, is_last: bool = False) -> None:
    """Close connections once the peers have read everything, or after 2 seconds."""
    with Reactor() as reactor:
        for connection in connections:
            connection.end(reactor, is_last=is_last)
        reactor.run_until(lambda: not reactor.watched, timeout_s=_GOODBYE_S)
        for connection in connections:
            connection.close("the launch has ended")


def _set_options(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform != "linux":  # the options' numbers are Linux's
        return
    with contextlib.suppress(OSError):  # an older kernel
        # The delay doubles each time. At 30 % packet loss it exceeded --node-timeout in 1 of 16
        # connections within 100 s; with this limit, no silence was longer than 8 s.
        connection.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, 1000)
        # The kernel gives up after 15 retransmissions, now 13 s; --node-timeout is our limit.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _A_DAY_MS)


def _addresses(connection: socket.socket) -> tuple[str, str]:
    """Return our address and the peer's, the latter "" if it is gone already."""
    own = address_of(connection.getsockname())
    try:
        return own, address_of(connection.getpeername())
    except OSError:
        return own, ""
