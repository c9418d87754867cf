"""The values of options that have a few, and defaults: options and requests are made of them."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:  # --help does without it
    from meshrun.layout.placing import Place

PLACES: tuple[Place, ...] = ("contiguous", "auto")
MeshInit = Literal["eager", "lazy"]
NumaBinding = Literal["node", "socket", "exclusive", "core-complex"]
NUMA_BINDINGS: tuple[NumaBinding, ...] = get_args(NumaBinding)
StartMethod = Literal["fork", "exec"]
AnyStartMethod = Literal["fork", "exec", "forkserver", "spawn"]
"""With the other names that torchrun has."""
Prefix = Literal["mesh", "torchrun", "none"]
ShownNodes = Literal["all", "first-node"]
ExitCodes = Literal["worker", "torchrun"]
TEMPLATE_FIELDS = (
    "role_name", "local_rank", "rank", "hostname", "host", "node_rank", "coordinate", "time",
)  # fmt: skip
"""The fields that ``--log-line-prefix-template`` fills in."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that end a launch. torchrun's include SIGQUIT, which here asks where ranks are."""
JOB_SCHEDULERS = ("slurm", "kubernetes", "jobset", "trainjob", "leaderworkerset")
STARTERS_OF_SCHEDULERS: Mapping[str, tuple[str, ...]] = {
    "blaunch": ("blaunch",),  # of LSF
    "qrsh": ("qrsh", "-inherit"),  # of Grid Engine
}
"""The values of ``--launcher`` besides ``ssh``, with the words before a host."""
SHELLS = ("bash", "zsh", "fish", "tcsh")
Format = Literal["text", "json", "svg"]
FORMATS: tuple[Format, ...] = get_args(Format)
LogFormat = Literal["text", "json"]
