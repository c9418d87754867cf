"""Lines for a log collector, each one JSON object (``--log-format json``)."""

from __future__ import annotations

import json
from datetime import datetime, timezone


def as_json_lines(text: str, **fields: object) -> str:
    """Return each line of a text as an object with ``time``, the fields and ``message``."""
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    lines = text.removesuffix("\n").split("\n")
    return "".join(
        json.dumps({"time": now, **fields, "message": line.removesuffix("\r")}) + "\n"
        for line in lines
    )


def as_json_message(text: str) -> str:
    """Return a message of meshrun's, with any number of lines, as one object."""
    level = "error" if "error: " in text else "info"
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    message = text.strip("\n").removeprefix("meshrun: ")
    return json.dumps({"time": now, "source": "meshrun", "level": level, "message": message})
