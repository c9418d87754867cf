"""Client of a ``torchrun.logs_specs`` plug-in, which runs in another process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping

from meshrun.errors import HostError, UsageError
from meshrun.host.entry_points import entry_points
from meshrun.plan.log_files import PLUG_INS, PluginOptions, RankFiles
from meshrun.plan.parse import Streams
from meshrun.plan.request import LogRequest
from meshrun.protocol.packing import convert, read_json, to_builtins
from meshrun.start import own_command


class LogsPlugin:
    """Asks the plug-in for the files of each generation of ranks."""

    def __init__(self, logs: LogRequest, local_ranks: frozenset[int] | None, nproc: int) -> None:
        """Start the plug-in; it imports torch while the launch continues.

        Raises:
            UsageError: If no package has a plug-in of this name.
        """
        self._name = logs.logs_specs or ""
        if self._name not in entry_points(PLUG_INS):
            raise UsageError(
                f"--logs-specs: no plugin named `{self._name}`",
                hint=f"an installed package must register it as an entry point in {PLUG_INS}",
            )
        self._process = subprocess.Popen(
            own_command("logs-plugin", self._name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        self._send(
            PluginOptions(
                log_dir=logs.log_dir,
                redirects=_choice(logs.redirects, nproc),
                tee=_choice(logs.tee, nproc),
                local_ranks=sorted(local_ranks or ()),
            )
        )

    def choose(self, envs: Mapping[int, Mapping[str, str]]) -> dict[int, RankFiles]:
        """Return the files of each local rank, given the environments of all.

        Raises:
            HostError: If the plug-in fails.
        """
        self._send(envs)
        answer = self._process.stdout.readline() if self._process.stdout else ""
        if not answer:
            raise HostError(
                f"the --logs-specs plugin `{self._name}` failed",
                hint="see its traceback above",
            )
        files: dict[int, RankFiles] = convert(dict[int, RankFiles], read_json(answer))
        return files

    def _send(self, value: object) -> None:
        try:
            print(json.dumps(to_builtins(value)), file=self._process.stdin, flush=True)
        except BrokenPipeError:  # the missing answer shows it
            pass

    def close(self) -> None:
        """End the plug-in."""
        if self._process.stdin:
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()


def _choice(streams: Streams, nproc: int) -> int | dict[int, int]:
    if not streams.of_ranks:
        return streams.everywhere
    return {rank: streams.of(rank) for rank in range(nproc)}
