"""Plans and reports conform to their published JSON Schemas.

That of reports is generated from its classes: ``UPDATE_GOLDEN=1 python -m pytest tests/golden``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from meshrun.errors import MeshrunError, UsageError
from meshrun.protocol.rank_end import RankRaised
from meshrun.protocol.result import LaunchResult, RankFailure, Resize, Timings
from meshrun.report.result_json import SCHEMA_NAME, SCHEMA_VERSION, render_result_json
from meshrun.wording import DOCS
from tests.golden.json_types import PLAIN, descriptions
from tests.kit import ROOT, in_turn

validator = pytest.importorskip("jsonschema", reason="needs kubernetes-validate")

REFERENCE = ROOT / "docs" / "reference"
TROUBLE = {
    "type": "object",
    "properties": {
        "kind": {"type": "string"},
        "message": {"type": "string"},
        "hint": {"type": ["string", "null"]},
        "exit_code": {"type": "integer"},
    },
    "required": ["kind", "message", "hint", "exit_code"],
}
PLANS = {
    "derived": ["--mesh", "dp=4,tp=2", "--flatten", "all=dp+tp", "--view", "moe:ep=8"],
    "nodes": ["--mesh", "tp=4,dp=2", "--nnodes", "2", "--domain-size", "2"],
    "none": ["--nproc-per-node", "2"],
    "hosts": ["--hosts", "a:2,b:1", "--mesh", "dp=-1", "--max-restarts", "1"],
    "unnamed": ["--mesh", "2x2", "--numa-binding", "exclusive"],
}


def schema_of(hint: Any) -> dict[str, Any]:
    """Return the schema of the JSON for a value of this type."""
    if dataclasses.is_dataclass(hint):
        return schema_of_class(hint)
    if hint is MeshrunError:
        return TROUBLE
    if get_origin(hint) is tuple:
        return {"type": "array", "items": schema_of(get_args(hint)[0])}
    if get_origin(hint) is types.UnionType:
        return {"anyOf": [schema_of(kind) for kind in get_args(hint)]}
    return {"type": PLAIN[hint]}


def schema_of_class(kind: Any) -> dict[str, Any]:
    hints, texts = get_type_hints(kind), descriptions(kind)
    properties = {
        field.name: schema_of(hints[field.name])
        | ({"description": in_json(texts[field.name])} if field.name in texts else {})
        for field in dataclasses.fields(kind)
    }
    return {"type": "object", "properties": properties, "required": [*properties]}


def in_json(docstring: str) -> str:
    """Return the text of a docstring for readers of JSON, in Markdown on one line."""
    return " ".join(docstring.replace("``None``", "null").replace("``", "`").split())


def render_report_schema() -> str:
    name = {
        "type": "object",
        "properties": {"name": {"const": SCHEMA_NAME}, "version": {"const": SCHEMA_VERSION}},
        "required": ["name", "version"],
    }
    made = schema_of_class(LaunchResult)
    return json.dumps(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": f"{DOCS}/report.schema.json",
            "title": "meshrun --report",
            "type": "object",
            "properties": {"schema": name, **made["properties"]},
            "required": ["schema", *made["required"]],
        },
        indent=2,
    ) + "\n"  # fmt: skip


def check(value: Any, name: str) -> None:
    """Validate a value against a published schema, which must name each of its fields."""
    schema = json.loads((REFERENCE / name).read_text())
    validator.Draft202012Validator.check_schema(schema)
    assert schema["$id"] == f"{DOCS}/{name}"
    validator.validate(value, schema)
    for kind in schema.get("oneOf", ()):
        if kind["properties"]["schema"]["properties"]["name"]["const"] == value["schema"]["name"]:
            schema = kind
    assert list(unknown(value, schema)) == []


def unknown(value: Any, schema: dict[str, Any]) -> Iterator[str]:
    """Yield the fields that a schema does not name."""
    for kind in schema.get("anyOf", ()):
        if kind.get("type") in ("object", "array") and value is not None:
            schema = kind
    if isinstance(value, list):
        for each in value:
            yield from unknown(each, schema["items"])
    elif isinstance(value, dict) and "properties" in schema:
        yield from value.keys() - schema["properties"].keys()
        for name, part in value.items():
            yield from unknown(part, schema["properties"].get(name, {}))


def test_a_report_conforms_to_its_schema() -> None:
    """With each kind of value that a report can hold."""
    path = REFERENCE / "report.schema.json"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(render_report_schema())
    assert path.read_text() == render_report_schema()

    raised = RankRaised(
        rank=1, kind="ValueError", message="the loss is nan", traceback="...", at_ns=1, shown=False
    )
    failure = RankFailure(
        rank=1, coordinate=(0, 1), label="dp0 tp1", host="a", pid=7, exit_code=1, signum=None,
        at_ns=1, raised=raised, asked_to_end=False, stack=("main",),
    )  # fmt: skip
    resize = Resize(
        generation=1, left=("b",), joined=(), shapes="dp 2 -> 1", mesh="dp=1", hosts=("a",)
    )
    failed = LaunchResult(
        exit_code=1, signum=None, failures=(failure,), broken_program=None,
        trouble=UsageError("no", hint="yes"), timings=Timings(began_ns=1), resizes=(resize,),
        generation=1, best_steps=(None, 3), log_folder="/logs",
    )  # fmt: skip
    for result in (failed, dataclasses.replace(failed, failures=(), trouble=None, signum=2)):
        check(json.loads(render_result_json(result)), "report.schema.json")


def test_plans_conform_to_their_schema(fake_torch: Path) -> None:
    """As --dry-run prints them, in full and for one rank."""
    end = ["--device", "cpu", "-n", "--format", "json", "train.py"]
    commands = [[*more, *plan, *end] for plan in PLANS.values() for more in ([], ["--rank", "1"])]
    for _, out, _ in in_turn(commands):
        check(json.loads(out), "plan.schema.json")
