"""Results and errors as JSON, for programs and between processes of meshrun."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import Annotated, Any

from msgspec import Meta

from meshrun import errors
from meshrun.errors import HostError, MeshrunError, SpecError, UsageError
from meshrun.host.folder import is_in_private, write_private
from meshrun.host.named_files import write_whole
from meshrun.host.printable import lines
from meshrun.host.stderr import discard_output, note
from meshrun.protocol.packing import ExitCode, convert, read_json
from meshrun.protocol.result import LaunchResult

SCHEMA_NAME = "meshrun.result"
SCHEMA_VERSION = 1
_PLACE = Annotated[int, Meta(ge=0, le=1 << 16)]
_ATTRIBUTES: dict[str, Any] = {
    "message": str, "hint": str | None, "exit_code": ExitCode, "is_reported_elsewhere": bool,
    "text": str, "position": _PLACE, "length": _PLACE, "option": str,
}  # fmt: skip
"""The attributes of errors, with the types to check in JSON from other machines."""
_OF_ALL = ("message", "hint", "exit_code", "is_reported_elsewhere")
_OF_A_SPEC = tuple(_ATTRIBUTES)


def leave_report(result: LaunchResult, path: str) -> None:
    """Write the report of a launch to a file that only this user can read; ``-`` is stdout.

    If the launch failed, an error in writing is only a message. So it is if the report is not the
    user's but for the process that started this launcher.

    Raises:
        HostError: If the launch succeeded and the report cannot be written.
        OSError: If the launch succeeded and the report was to go to stdout, which failed.
    """
    text, is_private = f"{render_result_json(result)}\n", is_in_private(path)
    try:
        if is_private:  # the caller's, which others might have replaced in its TMPDIR
            write_private(path, text)
        else:
            write_whole(path, text, "--report", is_private=True)
    except (MeshrunError, OSError) as error:
        if result.exit_code == 0 and not is_private:
            if isinstance(error, UsageError):  # the path was valid when the launch began
                raise HostError(error.message, hint=error.hint) from error
            raise
        if isinstance(error, MeshrunError):
            note(error.message)
        elif is_private:
            note(f"cannot write `{path}`: {error.strerror}")
        else:
            discard_output(sys.stdout)  # whose end would fail with what it has buffered
            note(f"cannot write the report: {error.strerror}")


def render_result_json(result: LaunchResult) -> str:
    """Return the result as one JSON object."""
    values = asdict(replace(result, trouble=None))
    values["trouble"] = None if result.trouble is None else _error_values(result.trouble)
    return json.dumps({"schema": {"name": SCHEMA_NAME, "version": SCHEMA_VERSION}, **values})


def parse_result_json(text: str) -> LaunchResult:
    """Return the result that :func:`render_result_json` wrote.

    Raises:
        ValueError: If the text is not such a result.
    """
    try:
        values = read_json(text)
        if values.pop("schema")["name"] != SCHEMA_NAME:
            raise ValueError("not a meshrun report")
        trouble = values.pop("trouble")
        result: LaunchResult = convert(LaunchResult, {**values, "trouble": None})
        return result if trouble is None else replace(result, trouble=_error(trouble))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a meshrun report: {error}") from error


def render_error_json(error: MeshrunError) -> str:
    """Return an error that prevented a launch as one JSON object."""
    return json.dumps(_error_values(error))


def parse_error_json(text: str) -> MeshrunError:
    """Return the error that :func:`render_error_json` wrote, of its own class and printable.

    Raises:
        ValueError: If the text is not such an error.
    """
    try:
        return _error(read_json(text))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not an error of meshrun: {error}") from error


def _error_values(error: MeshrunError) -> dict[str, Any]:
    values = vars(error).items()  # which may include notes
    plain = {name: value for name, value in values if isinstance(value, str | int | None)}
    return {"kind": type(error).__name__, **plain, "exit_code": error.exit_code}


def _error(values: dict[str, Any]) -> MeshrunError:
    kind = getattr(errors, values.pop("kind"), None)
    if not (isinstance(kind, type) and issubclass(kind, MeshrunError)):
        kind = MeshrunError
    needed = _OF_A_SPEC if issubclass(kind, SpecError) else _OF_ALL
    values = {"is_reported_elsewhere": False, **values}
    known = {name: convert(_ATTRIBUTES[name], values[name]) for name in needed}
    texts = {name: lines(value) for name, value in known.items() if isinstance(value, str)}
    error = kind.__new__(kind, known["message"])  # without __init__, whose arguments differ
    vars(error).update(known | texts)
    return error
