"""A launch on several hosts from one command: an agent on each, one launcher of them each.

This process starts no rank. It connects, says where the nodes meet, shows what comes back, passes
signals on, and is what the life of all launchers hangs on.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Sequence

from meshrun.errors import InternalError, MeshrunError
from meshrun.remote.connecting import Connector
from meshrun.remote.exchange import Exchange
from meshrun.remote.failing import Refusal, lost_error
from meshrun.remote.orders import devices_of, exported
from meshrun.remote.station import Station
from meshrun.request import LaunchRequest
from meshrun.result import signal_name
from meshrun.supervise.signals import SignalQueue

_OTHERS_TELL_S = 1.0
"""What launchers may take to say the same as the first that cannot launch."""
_GRACE_S = 10.0
"""What all others may take to end after one has, beside what ranks and lost nodes may."""


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
        self._request, self._words = request, words
        self._env = {
            **exported(os.environ, request.remote.export),
            "MESHRUN_SECRET": os.environ.get("MESHRUN_SECRET") or secrets.token_hex(32),
            "MESHRUN_CONDUCTED": "1",
        }
        self._signals = SignalQueue(
            request.stop_signals,
            even_if_ignored=request.stop_even_if_ignored,
            always=(signal.SIGQUIT, *request.forwarded_signals),
        )
        self._exchange = Exchange(self._signals)
        self._connector = Connector(request, self._exchange, version=version)
        self._stations, self._console = self._exchange.stations, self._exchange.console
        self._lost: list[Refusal] = []
        self._ending = False
        self._passed: set[int] = set()
        """Signals that were passed on."""
        self._end_at: float | None = None
        """When the others are ended, once one launcher has said why it cannot launch."""
        self._over_at: float | None = None
        """When whoever is left is given up, once one launcher has failed."""

    def run(self) -> int:
        """Launch, and return how the first node's launcher ended: exit code, or -n for signal n.

        Raises:
            MeshrunError: If a host cannot be used, or was lost.
            Stopped: If a signal came before all hosts had answered.
        """
        try:
            self._connector.connect()
            self._start(self._connector.meet())
            while not all(station.is_done for station in self._stations):
                self._exchange.turn(self._pass_on_signals)
                self._look()
        finally:
            self._exchange.close()
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

    def _pass_on_signals(self) -> None:
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
            if (why := self._why_lost(station, now)) is not None:
                self._lose(Refusal(station.host.name, why), station)
            elif station.ended is not None:
                station.is_done = True
                station.hang_up()
                if station.ended:
                    self._end_others(now, at_once=False)
                if "error" in station.files and self._end_at is None:
                    self._end_at = now + _OTHERS_TELL_S
        self._console.note_lost_output()
        is_due = self._end_at is not None and now > self._end_at
        if (is_due or self._console.reader_is_gone) and not self._ending:
            self._end_others(now, at_once=True)

    def _why_lost(self, station: Station, now: float) -> str | None:
        """Return why no more is to be expected of a host, if it did not end as launchers do."""
        if station.ended is not None:
            own = (*self._request.stop_signals, signal.SIGPIPE)
            if station.ended < 0 and -station.ended not in own and not self._ending:
                return f"its launcher was ended by {signal_name(-station.ended)}"
            return station.why_ended or None
        if station.is_closed:
            return station.finish().why
        if (silent_s := now - station.heard) > self._request.node_timeout_s:
            return f"nothing was heard of it for {silent_s:.0f} s"
        if self._over_at is not None and now > self._over_at:
            return "it did not end with the others"
        return None

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

    def _told_error(self, stations: Sequence[Station]) -> MeshrunError:
        """Return why the launch could not be made: once, though every launcher may say it."""
        from meshrun.report.result_json import parse_error_json

        error = parse_error_json(stations[0].files["error"])
        if len(stations) < len(self._stations):
            error.message = f"host {stations[0].host.name}: {error.message}"
        return error
