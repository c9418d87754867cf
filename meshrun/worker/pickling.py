"""Pickles objects with cloudpickle. Code keeps the name of its file, which tracebacks need."""

from __future__ import annotations

import io
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import IO, Any, ClassVar

from cloudpickle import CloudPickler


def dumps(value: object) -> bytes:
    """Return a pickled object."""
    file = io.BytesIO()
    dump(value, file)
    return file.getvalue()


def dump(value: object, file: IO[bytes]) -> None:
    """Pickle an object to a file."""
    _Pickler(file).dump(value)


def code_in_file(name: str, make: Callable[..., CodeType], parts: tuple[Any, ...]) -> CodeType:
    """Return unpickled code with the name of its file."""
    return make(*parts).replace(co_filename=name)


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    """Add the name of the file, which cloudpickle 3.1.3 and later replace."""
    return code_in_file, (code.co_filename, *CloudPickler.dispatch_table[CodeType](code))


class _Pickler(CloudPickler):  # type: ignore[misc]
    dispatch_table: ClassVar = ChainMap({CodeType: _reduce_code}, CloudPickler.dispatch_table)
