"""Runs a ``torchrun.logs_specs`` plug-in, named by the only argument.

It needs torch, and therefore a process of its own. It reads a line with the options, then a line
with the ranks' environments for each generation, which it answers with a line that names their
files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import entry_points
from typing import Any


def main(_: object) -> None:
    """Serve until stdin closes."""
    from torch.distributed.elastic.multiprocessing import Std

    options = json.loads(sys.stdin.readline())
    answers = sys.stdout
    sys.stdout = sys.stderr  # keep what the plug-in prints out of the answers
    entry, *_others = entry_points(group="torchrun.logs_specs", name=sys.argv[1])  # as torch does
    specs = entry.load()(
        log_dir=options["log_dir"],
        redirects=_streams(options["redirects"], Std),
        tee=_streams(options["tee"], Std),
        local_ranks_filter=set(options["local_ranks"]) if options["local_ranks"] else None,
    )
    for line in sys.stdin:
        envs = {int(rank): env for rank, env in json.loads(line).items()}
        print(json.dumps(asdict(specs.reify(envs))), file=answers, flush=True)


def _streams(choice: Mapping[str, int], std: Any) -> Any:
    """Return what torch's ``Std.from_str`` does: one value for all, or one per local rank."""
    if "all" in choice:
        return std(choice["all"])
    return {int(rank): std(streams) for rank, streams in choice.items()}
