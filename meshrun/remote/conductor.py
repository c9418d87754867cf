"""A launch on several hosts from one command: an agent on each, one launcher of them each.

This process starts no rank. It connects, says where the nodes meet, shows what comes back, passes
signals on, and is what the life of all launchers hangs on.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial

from meshrun.errors import InternalError, MeshrunError, RendezvousError
from meshrun.meeting import format_endpoint
from meshrun.remote.failing import (
    Refusal,
    describe_end,
    describe_silence,
    lost_error,
    refusal_error,
)
from meshrun.remote.orders import (
    boot_command,
    devices_of,
    exported,
    ssh_command,
    without_own,
)
from meshrun.remote.screen import Screen
from meshrun.remote.station import Station, end_all, is_this_machine
from meshrun.remote.talk import BEAT_S
from meshrun.request import LaunchRequest
from meshrun.roster import Host
from meshrun.supervise.signals import SignalQueue

_GRACE_S = 10.0
"""What all others may take to end after one has, beside what ranks and lost nodes may."""


class Stopped(Exception):
    """A signal came before anything was started."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Conductor:
    """One launch on several hosts.

    Args:
        request: What was asked for, hosts included.
        words: The command line of each node's launcher, but for what tells nodes apart.
        version: That of this meshrun, which every host has to have.
    """

    def __init__(self, request: LaunchRequest, words: Sequence[str], *, version: str) -> None:
        if request.remote is None:
            raise InternalError("there are no hosts to launch on")
        self._request, self._remote, self._words = request, request.remote, words
        self._version = version
        self._env = {
            **exported(os.environ, request.remote.export),
            "MESHRUN_SECRET": os.environ.get("MESHRUN_SECRET") or secrets.token_hex(32),
            "MESHRUN_CONDUCTED": "1",
        }
        self._screen = Screen()
        self._console = self._screen.console
        self._beaten = time.monotonic()
        self._stations: list[Station] = []
        self._lost: list[Refusal] = []
        self._started = self._ending = False
        self._passed: set[int] = set()
        """Signals that were passed on."""
        self._over_at: float | None = None
        """When whoever is left is given up, once one launcher has failed."""
        self._signals = SignalQueue(
            request.stop_signals,
            even_if_ignored=request.stop_even_if_ignored,
            always=(signal.SIGQUIT, *request.forwarded_signals),
        )

    def run(self) -> int:
        """Launch, and return how the first node's launcher ended: exit code, or -n for signal n.

        Raises:
            MeshrunError: If a host cannot be used, or was lost.
            Stopped: If a signal came before all hosts had answered.
        """
        try:
            self._connect()
            self._start(self._meet())
            while not all(station.is_done for station in self._stations):
                self._turn()
                self._look()
        finally:
            end_all(self._stations)
            for station in self._stations:
                station.close()
            self._screen.finish()
            self._signals.restore()
        if self._lost:
            raise lost_error(self._lost)
        if errors := [station for station in self._stations if "error" in station.files]:
            raise self._told_error(errors)
        if self._console.reader_is_gone:
            return -signal.SIGPIPE
        ended = self._stations[0].ended or 0
        return 128 - ended if ended - 128 in self._passed else ended

    @property
    def report(self) -> str | None:
        """What came of the launch as JSON, as far as it came to be one."""
        return self._stations[0].files.get("report") if self._stations else None

    # ---- before the start -------------------------------------------------------------------

    def _connect(self) -> None:
        """Have an agent on each host.

        Raises:
            RendezvousError: If there is a host without, after all others were tried too.
        """
        for number, host in enumerate(self._remote.hosts):
            self._stations.append(self._go_to(number, host))
        names = ", ".join(host.name for host in self._remote.hosts[:8])
        self._console.set_status(f"connecting to {names}")
        refusals: dict[int, Refusal] = {}
        while len(refusals) + sum(each.ready is not None for each in self._stations) < len(
            self._stations
        ):
            self._turn()
            for station in self._stations:
                if station.ready is not None or station.number in refusals:
                    continue
                if (refusal := self._refusal(station)) is not None:
                    refusals[station.number] = refusal
            self._stop_early()
        self._console.set_status("")
        if refusals:
            found = [refusals[number] for number in sorted(refusals)]
            raise refusal_error(found, len(self._stations))

    def _go_to(self, number: int, host: Host) -> Station:
        remote, env = self._remote, without_own(os.environ)
        if is_this_machine(host):
            command = boot_command(sys.executable)
        else:
            env = dict(os.environ)
            command = ssh_command(remote.ssh, host, sys.executable, remote.connect_timeout_s)
        try:
            station = Station(number, host, command, env)
        except OSError as error:
            raise RendezvousError(
                f"`{command[0]}` cannot be run: {error.strerror}",
                hint="--ssh says what to run as ssh",
            ) from error
        station.tell(
            nonce=station.nonce,
            version=self._version,
            path=[path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path],
            cwd=os.getcwd(),
            lease_s=self._request.node_timeout_s,
            grace_s=self._request.shutdown_timeout_s,
        )
        return station

    def _refusal(self, station: Station) -> Refusal | None:
        """Return why a host cannot be used, as far as that is known by now."""
        name, destination = station.host.name, station.host.destination
        if station.refused is not None:
            return Refusal(name, station.refused["refused"], station.refused["hint"])
        if station.is_closed:
            code = station.finish()
            return describe_end(name, destination, code, station.said, sys.executable)
        timeout_s = self._remote.connect_timeout_s
        if time.monotonic() - station.began > timeout_s:
            return describe_silence(name, destination, timeout_s, station.said)
        return None

    def _meet(self) -> list[str]:
        """Return the options that bring the nodes together; the first one's agent listens."""
        asked = self._request.rendezvous
        nnodes = ["--nnodes", str(len(self._stations))]
        if len(self._stations) == 1 or asked.endpoint or asked.master_addr:
            return nnodes
        first, *others = self._stations
        known = first.ready or {}
        seen = [(other.ready or {}).get("theirs", "") for other in others]
        first.tell(listen=[known.get("own", ""), *seen])
        began = time.monotonic()
        while first.endpoint is None:
            self._turn()
            self._stop_early()
            waited_s = time.monotonic() - began
            if first.refused is not None or first.is_closed or waited_s > _GRACE_S:
                said = (first.refused or {}).get("refused", first.said.strip())
                raise RendezvousError(f"host {first.host.name} cannot listen: {said}")
        return [*nnodes, "--rdzv-endpoint", format_endpoint(*first.endpoint)]

    def _start(self, meeting: Sequence[str]) -> None:
        nproc = self._request.nproc_per_node
        workers = [nproc] if isinstance(nproc, int) else nproc
        if isinstance(workers, list | tuple):
            meeting = [*meeting, "--nproc-per-node", ",".join(map(str, workers))]
        for station in self._stations:
            place = ["--node-rank", str(station.number)] if len(self._stations) > 1 else []
            station.tell(
                start=[*meeting, *place, *self._words],
                env={**self._env, **devices_of(station.host)},
                listens=station.endpoint is not None,
            )
        self._started = True

    def _stop_early(self) -> None:
        for signum in self._signals.take():
            if signum in self._request.stop_signals:
                raise Stopped(signum)

    # ---- the loop ---------------------------------------------------------------------------

    def _turn(self) -> None:
        """Wait for whatever comes first, and take it."""
        with selectors.PollSelector() as selector:
            selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
            for station in self._stations:
                if station.outbox.queued_bytes:
                    selector.register(station.outbox, selectors.EVENT_WRITE, station.outbox.flush)
                if self._console.is_full:
                    station.heard = time.monotonic()  # it is we who do not listen
                    continue
                for fd in station.open_pipes:
                    take = partial(station.read, fd, self._screen.show)
                    selector.register(fd, selectors.EVENT_READ, take)
            self._screen.watch(selector)
            wake_ns = self._console.next_wake_ns
            until_wake_s = BEAT_S if wake_ns is None else (wake_ns - time.monotonic_ns()) / 1e9
            for key, _ in selector.select(max(0.0, min(BEAT_S, until_wake_s))):
                key.data()
        self._console.show_waiting()
        self._beat()

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beaten >= BEAT_S:
            self._beaten = now
            for station in self._stations:
                if station.ready is not None:
                    station.tell(beat=1)

    def _on_signals(self) -> None:
        if not self._started:
            return  # whoever waits takes them
        for signum in self._signals.take():
            self._passed.add(signum)
            for station in self._stations:
                # Once nodes have met, the first passes on to the others what concerns them all.
                for_itself = station.number == 0 or signum in self._request.forwarded_signals
                station.tell(signal=int(signum), even_if_met=for_itself)

    def _look(self) -> None:
        """Find who has ended or is lost, and have the others end then."""
        now = time.monotonic()
        for station in self._stations:
            if station.is_done:
                continue
            if station.ended is not None:
                station.is_done = True
                station.hang_up()
                if station.ended:
                    self._end_others(now, at_once="error" in station.files)
            elif station.is_closed:
                code = station.finish()
                name, destination = station.host.name, station.host.destination
                self._lose(
                    describe_end(name, destination, code, station.said, sys.executable), station
                )
            elif now - station.heard > self._request.node_timeout_s:
                silent_s = now - station.heard
                self._lose(
                    Refusal(station.host.name, f"nothing was heard of it for {silent_s:.0f} s"),
                    station,
                )
            elif self._over_at is not None and now > self._over_at:
                self._lose(Refusal(station.host.name, "it did not end with the others"), station)
        self._console.note_lost_output()
        if self._console.reader_is_gone and not self._ending:
            self._end_others(now, at_once=True)

    def _lose(self, why: Refusal, station: Station) -> None:
        if not self._lost:
            self._console.note(f"host {why.host} was lost: {why.why}")
        self._lost.append(why)
        station.is_done = True
        station.close()
        self._end_others(time.monotonic(), at_once=True)

    def _end_others(self, now: float, *, at_once: bool) -> None:
        """Have whoever is left end; those that have met do so by themselves."""
        if self._over_at is None:
            grace_s = self._request.shutdown_timeout_s + self._request.node_timeout_s
            self._over_at = now + grace_s + _GRACE_S
        if at_once and not self._ending:
            self._ending = True
            for station in self._stations:
                if not station.is_done:
                    station.tell(end=1)

    # ---- the end ----------------------------------------------------------------------------

    def _told_error(self, stations: Sequence[Station]) -> MeshrunError:
        """Return why the launch could not be made: once, though every launcher may say it."""
        from meshrun.report.result_json import parse_error_json

        error = parse_error_json(stations[0].files["error"])
        if len(stations) < len(self._stations):
            error.message = f"host {stations[0].host.name}: {error.message}"
        return error
