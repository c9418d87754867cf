"""Runs a ``torchrun.logs_specs`` plug-in, named by the only argument.

It needs torch, and therefore a process of its own. It reads a line with the options, then a line
with the ranks' environments for each generation, which it answers with a line that names their
files.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import entry_points
from typing import Any

from meshrun.plan.log_files import PLUG_INS, PluginOptions, RankFiles, StreamFile
from meshrun.protocol.packing import convert, read_json, to_builtins


def main(_: object) -> None:
    """Serve until stdin closes."""
    from torch.distributed.elastic.multiprocessing import Std

    options: PluginOptions = convert(PluginOptions, read_json(sys.stdin.readline()))
    answers = sys.stdout
    sys.stdout = sys.stderr  # keep what the plug-in prints out of the answers
    entry, *_others = entry_points(group=PLUG_INS, name=sys.argv[1])  # as torch does
    specs = entry.load()(
        log_dir=options.log_dir,
        redirects=_streams(options.redirects, Std),
        tee=_streams(options.tee, Std),
        local_ranks_filter={*options.local_ranks} or None,
    )
    for line in sys.stdin:
        envs: dict[int, dict[str, str]] = convert(dict[int, dict[str, str]], read_json(line))
        chosen = specs.reify(envs)
        files = {rank: _files(chosen, rank) for rank in envs}
        print(json.dumps(to_builtins(files)), file=answers, flush=True)


def _streams(choice: int | dict[int, int], std: Any) -> Any:
    """Return what torch's ``Std.from_str`` does: one value for all, or one per local rank."""
    if isinstance(choice, int):
        return std(choice)
    return {rank: std(streams) for rank, streams in choice.items()}


def _files(chosen: Any, rank: int) -> RankFiles:
    """Return the files of a local rank in torch's ``LogsDest``."""

    def stream(paths: dict[int, str], teed: dict[int, str], filtered: str) -> StreamFile:
        path = paths.get(rank) or None
        is_teed = path is not None and rank in teed
        return StreamFile(
            path=path, printed=is_teed or path is None, filtered=filtered if is_teed else ""
        )

    return RankFiles(
        stdout=stream(chosen.stdouts, chosen.tee_stdouts, chosen.filtered_stdout),
        stderr=stream(chosen.stderrs, chosen.tee_stderrs, chosen.filtered_stderr),
        error_file=chosen.error_files.get(rank, ""),
    )
