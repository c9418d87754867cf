"""The published JSON Schema of events is generated from their classes.

``UPDATE_GOLDEN=1 python -m pytest tests/golden`` regenerates it.
"""

from __future__ import annotations

import inspect
import json
import os
import types
from typing import Any, get_args, get_origin, get_type_hints

from meshrun.report import launch_events
from tests.golden.json_types import PLAIN, descriptions
from tests.kit import ROOT

FILE = ROOT / "docs" / "reference" / "events.schema.json"


def type_of(hint: Any) -> dict[str, Any]:
    if get_origin(hint) is list:
        return {"type": "array", "items": type_of(get_args(hint)[0])}
    if get_origin(hint) is types.UnionType:
        return {"type": [PLAIN[kind] for kind in get_args(hint)]}
    return {"type": PLAIN[hint]}


def event(kind: type[launch_events.Record]) -> dict[str, Any]:
    hints, texts = get_type_hints(kind), descriptions(kind)
    own = {
        name: type_of(hint) | ({"description": texts[name]} if name in texts else {})
        for name, hint in hints.items()
    }
    name = kind.__struct_config__.tag
    return {
        "description": inspect.getdoc(kind),
        "properties": {"event": {"const": name}, **own},
        "required": ["event", *own],
    }


def render() -> str:
    common = {
        "schema": {
            "type": "object",
            "properties": {
                "name": {"const": launch_events.SCHEMA_NAME},
                "version": {"const": launch_events.SCHEMA_VERSION},
            },
            "required": ["name", "version"],
        },
        "time": {"type": "string", "format": "date-time", "description": "By the node's clock."},
        "run_id": {"type": "string", "description": "The same on all nodes."},
        "host": {"type": "string"},
        "node_rank": {"type": "integer"},
        "generation": {
            "type": "integer",
            "description": "The number of the generation, from 0.",
        },
        "event": {"type": "string"},
    }
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of meshrun --events",
        "type": "object",
        "properties": common,
        "required": list(common),
        "oneOf": [event(kind) for kind in launch_events.Record.__subclasses__()],
    }
    return json.dumps(schema, indent=2) + "\n"


def test_the_published_schema_is_current() -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        FILE.write_text(render())
    assert FILE.read_text() == render()
