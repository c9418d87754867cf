"""What the generated JSON Schemas share: names of types, and descriptions of fields."""

from __future__ import annotations

import inspect
import re
from typing import Any

from meshrun.protocol.packing import Line, Time

PLAIN: dict[Any, str] = {
    int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null",
    Time: "integer", Line: "string",
}  # fmt: skip


def descriptions(kind: type) -> dict[str, str]:
    """Return the docstring of each field of a class."""
    source = inspect.getsource(kind)
    return dict(re.findall(r'^    (\w+): [^\n]*\n    """(.*?)"""', source, re.M | re.S))
