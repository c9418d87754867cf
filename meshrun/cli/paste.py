"""The command that starts meshrun on the other nodes, for people to paste."""

from __future__ import annotations

import shlex

from meshrun.cli.words import CommandLine

_OF_ONE_NODE = ("--node-rank", "--rdzv-endpoint", "--master-addr", "--master-port", "--local-addr")


def command_for_others(line: CommandLine) -> str:
    """Return the command line for the other nodes, where ``ENDPOINT`` is yet to be filled in.

    Example:
        >>> takes_value = {"--nnodes": True, "--node-rank": True}
        >>> options = ("--nnodes", "2", "--node-rank=0")
        >>> command_for_others(CommandLine(options, ("train.py", "--lr", "1"), takes_value))
        'meshrun --rdzv-endpoint ENDPOINT --nnodes 2 train.py --lr 1'
    """
    return f"meshrun --rdzv-endpoint ENDPOINT {shlex.join(line.words(without=_OF_ONE_NODE))}"
