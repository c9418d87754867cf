"""Paths of log files, in torchrun's layout of a log directory. Pure.

    DIR/<run id>_<random>/attempt_<n>/<local rank>/{stdout.log,stderr.log,error.json}
    DIR/<run id>_<random>/attempt_<n>/{filtered_stdout.log,filtered_stderr.log}

With several nodes, the name of the node follows the run id.

Source:
    ``DefaultLogsSpecs.reify`` in torch 2.13's ``distributed/elastic/multiprocessing/api.py``.
"""

from __future__ import annotations

import os

from msgspec import Struct

from meshrun.plan.request import LogRequest

_OUT, _ERR = 1, 2
PLUG_INS = "torchrun.logs_specs"
"""The entry points that choose the files."""


class StreamFile(Struct, frozen=True, kw_only=True):
    """Where one stream of a rank goes."""

    path: str | None
    """The file it is written to, or ``None``."""
    printed: bool
    """Whether it goes to the console."""
    filtered: str = ""
    """The file to which filtered lines of all ranks are copied; "" for none."""


class RankFiles(Struct, frozen=True, kw_only=True):
    """The files of one rank in one generation."""

    stdout: StreamFile
    stderr: StreamFile
    error_file: str
    """The file to which torch-elastic's ``record`` writes an exception; "" for none."""


class PluginOptions(Struct, frozen=True, kw_only=True):
    """What a plug-in that chooses the files is created with."""

    log_dir: str | None
    redirects: int | dict[int, int]
    """Streams of all ranks, or of each local rank."""
    tee: int | dict[int, int]
    local_ranks: list[int]
    """The ranks whose output is printed; empty for all."""


def attempt_folder(run_folder: str, generation: int) -> str:
    """Return the folder of one generation of ranks."""
    return os.path.join(run_folder, f"attempt_{generation}")


def rank_files(logs: LogRequest, run_folder: str, generation: int, local_rank: int) -> RankFiles:
    """Return the files of one rank.

    As in torchrun, ``--log-dir /dev/null`` means no files.
    """
    if logs.log_dir == os.devnull:
        printed = StreamFile(path=None, printed=True)
        return RankFiles(stdout=printed, stderr=printed, error_file="")
    attempt = attempt_folder(run_folder, generation)
    folder = os.path.join(attempt, str(local_rank))

    def stream(bit: int, name: str) -> StreamFile:
        teed = bool(logs.tee.of(local_rank) & bit)
        to_file = teed or bool(logs.redirects.of(local_rank) & bit)
        path = os.path.join(folder, name) if to_file else None
        filtered = os.path.join(attempt, f"filtered_{name}") if teed else ""
        return StreamFile(path=path, printed=teed or not to_file, filtered=filtered)

    return RankFiles(
        stdout=stream(_OUT, "stdout.log"),
        stderr=stream(_ERR, "stderr.log"),
        error_file=os.path.join(folder, "error.json"),
    )


def run_folder_prefix(run_id: str, host: str) -> str:
    """Return the first part of the name of a run's folder, safe as a file name.

    Args:
        run_id: The run id, or "" if each node has a different one.
        host: This node's name if there are several.
    """
    name = "_".join(filter(None, (run_id, host)))
    return "".join(char if char.isalnum() or char in "-_.=+@" else "_" for char in name) + "_"
