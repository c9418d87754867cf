"""The values of options that have a few: the types, from which the options are made."""

from __future__ import annotations

from typing import Literal, get_args

MeshInit = Literal["eager", "lazy"]
NumaBinding = Literal["node", "socket", "exclusive", "core-complex"]
NUMA_BINDINGS: tuple[NumaBinding, ...] = get_args(NumaBinding)
Prefix = Literal["mesh", "torchrun", "none"]
ShownNodes = Literal["all", "first-node"]
ExitCodes = Literal["worker", "torchrun"]
FORMATS = ("text", "json", "svg")
