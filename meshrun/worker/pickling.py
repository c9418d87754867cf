"""Pickles what callers and ranks exchange, so that tracebacks show its code, and exceptions arrive.

Code keeps the name of its file, and its source if that is in no file. An exception arrives as a
copy as close to it as the receiver can make.
"""

from __future__ import annotations

import io
import linecache
import pickle
from collections import ChainMap
from collections.abc import Callable
from contextlib import suppress
from types import CodeType
from typing import IO, Any, ClassVar, TypeVar

from cloudpickle import CloudPickler

_T = TypeVar("_T")
_FAILURES = (Exception, SystemExit)
"""What foreign code may raise while it pickles or unpickles something."""


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


def remember_source(name: str, text: str) -> None:
    """Let tracebacks show the lines of the code with this file name."""
    lines = [f"{line}\n" for line in text.splitlines()]  # the last one too: Python 3.11 counts it
    linecache.cache[name] = (len(text), None, lines, name)


def with_source(call: _T, name: str, text: str) -> _T:
    """Return a call that was pickled with the source of its function."""
    remember_source(name, text)
    return call


def pickle_error(error: BaseException) -> bytes:
    """Return the pickled text of an exception and two forms of it: whole, and in parts.

    Unpickling the whole needs an ``__init__`` that takes ``args`` and attributes that can be
    pickled.
    """
    return pickle.dumps((_text(error), _dumps(error), _dumps_parts(error)))


def unpickle_error(pickled: bytes) -> BaseException | None:
    """Return a copy, if possible one with the same text; ``None`` if none can be made here."""
    text, whole, parts = pickle.loads(pickled)  # noqa: S301 - our ranks wrote it
    found: list[BaseException] = []
    for load, data in ((pickle.loads, whole), (_join, parts)):
        with suppress(*_FAILURES):
            copy = load(data or b"")
            if isinstance(copy, BaseException):
                found_text = _text(copy)
                if found_text == text:
                    return copy
                if found_text is not None:
                    found.append(copy)
    return found[0] if found else None


def _dumps(thing: object) -> bytes | None:
    with suppress(*_FAILURES):
        return dumps(thing)
    return None


def _dumps_parts(error: BaseException) -> bytes | None:
    """Pickle class, args and attributes, except for attributes that cannot be pickled."""
    made_of = _builtin_base(type(error)).__reduce__(error)[1]
    with suppress(*_FAILURES):
        args = tuple(_dumps(arg) or _dumps(repr(arg)) for arg in made_of)
        attributes = {name: _dumps(value) for name, value in vars(error).items()}
        return _dumps((type(error), args, attributes))
    return None


def _join(parts: bytes) -> BaseException:
    """Make an exception from its parts, without the ``__init__`` of its class."""
    kind, pickled_args, attributes = pickle.loads(parts)  # noqa: S301 - our ranks wrote it
    args = tuple(map(pickle.loads, pickled_args))
    base = _builtin_base(kind)
    error: BaseException = base.__new__(kind, *args)
    base.__init__(error, *args)  # sets Python's own attributes, such as `errno`
    for name, value in attributes.items():
        with suppress(*_FAILURES):
            vars(error)[name] = pickle.loads(value or b"")  # noqa: S301
    return error


def _builtin_base(kind: type[BaseException]) -> type[BaseException]:
    """Return the first base class that is Python's own."""
    return next(each for each in kind.__mro__ if each.__module__ == "builtins")


def _text(error: BaseException) -> str | None:
    with suppress(*_FAILURES):
        return "".join([str(error)])  # not a subclass of str, which others may lack
    return None
