"""The command that starts meshrun on the other nodes, for people to paste."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

_OF_ONE_NODE = ("--node-rank", "--rdzv-endpoint", "--master-addr", "--master-port", "--local-addr")


def command_for_others(options: Sequence[str], program: Sequence[str]) -> str:
    """Return the command line for the other nodes, where ``ENDPOINT`` is yet to be filled in.

    Args:
        options: Words of this command line before the program.
        program: The program and its arguments.

    Example:
        >>> command_for_others(["--nnodes", "2", "--node-rank=0"], ["train.py", "--lr", "1"])
        'meshrun --rdzv-endpoint ENDPOINT --nnodes 2 train.py --lr 1'
    """
    words, kept = list(options), []
    while words:
        word = words.pop(0)
        if word.partition("=")[0].replace("_", "-") in _OF_ONE_NODE:
            if "=" not in word:
                del words[:1]
            continue
        kept.append(word)
    return " ".join(["meshrun", "--rdzv-endpoint", "ENDPOINT", shlex.join([*kept, *program])])
