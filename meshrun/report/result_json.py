"""What came of a launch as JSON, for programs; read back by the Python API."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from typing import Any

from meshrun.errors import HostError, MeshrunError
from meshrun.events import RankRaised
from meshrun.result import LaunchResult, RankFailure, Timings

SCHEMA_NAME = "meshrun.result"
SCHEMA_VERSION = 1


def write_report(result: LaunchResult, path: str) -> None:
    """Write ``result`` to a file, which appears whole or not at all.

    Raises:
        HostError: If it cannot be written.
    """
    folder = os.path.dirname(os.path.abspath(path))
    try:
        descriptor, unfinished = tempfile.mkstemp(dir=folder, prefix=".meshrun_report_")
        with os.fdopen(descriptor, "w") as file:
            file.write(render_result_json(result) + "\n")
        os.replace(unfinished, path)
    except OSError as error:
        raise HostError(f"the report `{path}` could not be written: {error.strerror}") from error


def render_result_json(result: LaunchResult) -> str:
    """Return the result as one JSON object."""
    values = asdict(result)
    trouble = result.trouble
    values["trouble"] = (
        None
        if trouble is None
        else {"message": trouble.message, "hint": trouble.hint, "exit_code": trouble.exit_code}
    )
    return json.dumps({"schema": {"name": SCHEMA_NAME, "version": SCHEMA_VERSION}, **values})


def parse_result_json(text: str) -> LaunchResult:
    """Return the result that :func:`render_result_json` wrote.

    Raises:
        ValueError: If it is not one.
    """
    values: dict[str, Any] = json.loads(text)
    if values.pop("schema", {}).get("name") != SCHEMA_NAME:
        raise ValueError("not a report of meshrun")
    trouble = values.pop("trouble")
    if trouble is not None:
        error = MeshrunError(trouble["message"], hint=trouble["hint"])
        error.exit_code = trouble["exit_code"]
        trouble = error
    failures = tuple(_failure(failure) for failure in values.pop("failures"))
    timings = Timings(**values.pop("timings"))
    return LaunchResult(failures=failures, timings=timings, trouble=trouble, **values)


def _failure(values: dict[str, Any]) -> RankFailure:
    raised = values.pop("raised")
    coordinate = tuple(values.pop("coordinate"))
    return RankFailure(
        coordinate=coordinate, raised=RankRaised(**raised) if raised else None, **values
    )
