"""The text of a mesh and its value: ``dp=2,tp=4`` <-> MeshSpec. Independent of machines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from meshrun.errors import SpecError
from meshrun.layout.parameters import check_parameter
from meshrun.wording import count

AnyMesh: TypeAlias = str | int | Mapping[str, int | str] | Sequence[int | str]
"""A mesh in the forms that programs may pass."""
INFERRED = -1
"""The size of a dim to infer from the number of workers, as in ``torch.Tensor.view``."""

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SIZE = re.compile(r"-?[0-9]+|auto")
_RANGE = re.compile(r"([0-9]+)\s*:\s*([0-9]*)")
_NAMED_WITH_COLON = re.compile(r"(?:^|,)\s*[A-Za-z_]\w*\s*:")
_QUOTING = re.compile(r"[\[\](){}'\"]")
_WRITTEN_SIZE = r"(-1\b|\d+|auto\b)"
_PAIR = re.compile(rf"([A-Za-z_]\w*)\s*[:=]\s*{_WRITTEN_SIZE}|([A-Za-z_]{{2,}})\s*{_WRITTEN_SIZE}")
_JOINED = re.compile(r"(?<=\d)[xX*](?=[A-Za-z_])")
_BETWEEN = re.compile(r"[\s,;*xX]*")
"""What people write between the dims of a mesh."""
_LONGEST_MEANT = 200
_TOO_LONG = 10
_SIZES_HINT = "write sizes joined by `x`, such as `2x4`, or named dims, such as `dp=2,tp=4`"
_NAMES_HINT = (
    "a dim name starts with a letter or `_`, followed by letters, digits or `_`, such as `dp` or"
    " `ep_2`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec:
    """The shape of a mesh and the names of its dims, right dim fastest, as in torch.

    ``sizes`` may hold one ``-1`` until a world size is known; ``mesh_dim_names`` is ``None`` for
    a mesh whose dims have no names.
    """

    sizes: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None = None
    bounds: tuple[int, int | None] | None = None
    """Smallest and largest size of the dim that is ``-1``, if given as a range."""

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.sizes)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the dims: their names, or ``"0"``, ``"1"`` without names."""
        return self.mesh_dim_names or tuple(map(str, range(self.ndim)))

    @property
    def is_inferred(self) -> bool:
        """Whether one size is still ``-1``."""
        return INFERRED in self.sizes

    @property
    def known_size(self) -> int:
        """Product of the known sizes: the number of ranks if no size is inferred."""
        return math.prod(size for size in self.sizes if size != INFERRED)

    def with_size(self, dim: int, size: int) -> MeshSpec:
        """Return this spec with the size of one dim replaced, and without bounds."""
        sizes = (*self.sizes[:dim], size, *self.sizes[dim + 1 :])
        return MeshSpec(sizes=sizes, mesh_dim_names=self.mesh_dim_names)

    def __str__(self) -> str:
        return format_mesh(self)


def format_mesh(spec: MeshSpec) -> str:
    """Return the canonical text of ``spec``; the inverse of :func:`parse_mesh`.

    Example:
        >>> format_mesh(MeshSpec(sizes=(2, 4), mesh_dim_names=("dp", "tp")))
        'dp=2,tp=4'
    """
    sizes = [_format_size(size, spec.bounds) for size in spec.sizes]
    if spec.mesh_dim_names is None:
        return "x".join(sizes)
    pairs = zip(spec.mesh_dim_names, sizes, strict=True)
    return ",".join(f"{name}={size}" for name, size in pairs)


def _format_size(size: int, bounds: tuple[int, int | None] | None) -> str:
    if size != INFERRED or bounds is None:
        return str(size)
    return f"{bounds[0]}:{'' if bounds[1] is None else bounds[1]}"


def mesh_text(mesh: AnyMesh) -> str:
    """Return the text of a mesh given as ``{"dp": 2, "tp": 4}``, ``(2, 4)``, 8 or text.

    Raises:
        UsageError: If it has another type.

    Example:
        >>> mesh_text({"dp": 2, "tp": 4})
        'dp=2,tp=4'
    """
    check_parameter("the mesh", mesh, AnyMesh)
    if isinstance(mesh, Mapping):
        return ",".join(f"{name}={size}" for name, size in mesh.items())
    return str(mesh) if isinstance(mesh, str | int) else "x".join(map(str, mesh))


def parse_mesh(text: str, names: str | None = None) -> MeshSpec:
    """Parse the text of ``--mesh`` and, if given, of ``--names``.

    Args:
        text: ``2x4`` or ``dp=2,tp=4``; one size may be ``-1`` or a range such as ``2:8``.
        names: ``dp,tp``; only for sizes without names.

    Returns:
        The spec, with ``-1`` for an open size.

    Raises:
        SpecError: If one cannot be parsed, with the position of the first wrong character.

    Example:
        >>> parse_mesh("2x4", "dp,tp") == parse_mesh("dp=2,tp=4")
        True
    """
    if not text.strip():
        raise SpecError("the mesh is empty", text, 0, hint=_SIZES_HINT)
    if "=" in text or _NAMED_WITH_COLON.search(text):
        if names is not None:
            message = "both --mesh and --names name the dims"
            raise SpecError(message, names, 0, names, hint="remove --names")
        return _parse_named(text)
    sizes = _parse_sizes(text)
    parsed = None if names is None else _parse_names(names, len(sizes.found), text)
    return MeshSpec(sizes=tuple(sizes.found), mesh_dim_names=parsed, bounds=sizes.bounds)


def split_texts(texts: str | Iterable[str]) -> list[str]:
    """Return the values of an option that is given repeatedly, or once with ``;`` between them."""
    texts = [texts] if isinstance(texts, str) else texts
    return [part.strip() for text in texts for part in text.split(";") if part.strip()]


def items_of(text: str, separator: str) -> Iterator[tuple[int, str]]:
    """Split ``text`` and yield (position, item) without surrounding spaces."""
    start = 0
    for piece in text.split(separator):
        yield start + len(piece) - len(piece.lstrip()), piece.strip()
        start += len(piece) + len(separator)


def _parse_named(text: str) -> MeshSpec:
    names: list[str] = []
    sizes = _Sizes(text)
    for position, item in items_of(text, ","):
        if not item:
            raise SpecError("missing dim", text, min(position, len(text)), hint=_SIZES_HINT)
        name, equals, size = item.partition("=")
        if not equals:
            raise _not_a_pair(text, position, item)
        names.append(_check_name(text, position, name.rstrip(), names))
        size_at = position + len(name) + 1 + len(size) - len(size.lstrip())
        sizes.read(size_at, size.strip())
    return MeshSpec(sizes=tuple(sizes.found), mesh_dim_names=tuple(names), bounds=sizes.bounds)


def _not_a_pair(text: str, position: int, item: str) -> SpecError:
    name, colon, size = item.partition(":")
    if colon:
        message = "expected `=` between a dim and its size, found `:`"
        hint = _meant(text) or f"write `{name or 'dp'}={size or 2}`"
        return SpecError(message, text, position + len(name), hint=hint)
    if _SIZE.fullmatch(item):
        message = f"dim of size {item} has no name"
        hint = "name each dim, as in `dp=2,tp=4`, or none of them, as in `2x4`"
    else:
        message = f"`{item}` has no size"
        hint = f"write `{item if NAME.fullmatch(item) else 'dp'}=2`, or `-1` to infer it"
    return SpecError(message, text, position, item, hint=hint)


def _meant(text: str) -> str | None:
    """Return a hint with the probable meaning of ``(2,4)``, ``2*4`` or ``{"dp": 2}``, if any."""
    if len(text) > _LONGEST_MEANT:
        return None
    plain = _JOINED.sub(",", _QUOTING.sub("", text))
    if pairs := _PAIR.findall(plain):
        guess = ",".join(f"{name or glued}={size or its}" for name, size, glued, its in pairs)
        rest = _PAIR.sub("", plain)
    else:
        guess = "x".join(re.findall(_WRITTEN_SIZE, plain))
        rest = re.sub(_WRITTEN_SIZE, "", plain)
    if guess == text or not _BETWEEN.fullmatch(rest):
        return None
    try:
        return f"write `{format_mesh(parse_mesh(guess))}`"
    except SpecError:
        return None


def _parse_sizes(text: str) -> _Sizes:
    names = [name for name in re.split(r"[\s,]+", _QUOTING.sub("", text)) if name]
    if names and all(map(NAME.fullmatch, names)) and names != ["auto"] and not _meant(text):
        lacks = "no size" if len(names) == 1 else "names but no sizes"
        named, sized = ",".join(f"{name}=2" for name in names), "x".join("2" for _ in names)
        unnamed = f"--mesh {sized} --names {','.join(names)}"
        hint = f"write `{named}`, or `{unnamed}`; `-1` infers a size"
        raise SpecError(f"`{text}` has {lacks}", text, 0, text, hint=hint)
    if "," in text:
        message, hint = "expected `x` between sizes, found `,`", _meant(text) or _SIZES_HINT
        raise SpecError(message, text, text.index(","), hint=hint)
    sizes = _Sizes(text)
    for position, item in items_of(text, "x"):
        sizes.read(position, item)
    return sizes


def _parse_names(text: str, number: int, sizes_text: str) -> tuple[str, ...]:
    names: list[str] = []
    for position, item in items_of(text, ","):
        names.append(_check_name(text, position, item, names))
    if len(names) != number:
        message = f"mesh `{sizes_text}` has {count(number, 'dim')}, but --names has {len(names)}"
        hint = "pass one name per dim, in the order of the sizes"
        raise SpecError(message, text, 0, text, hint=hint)
    return tuple(names)


def _check_name(text: str, position: int, name: str, before: list[str]) -> str:
    if not NAME.fullmatch(name):
        good = NAME.match(name)
        wrong_at = position + (good.end() if good else 0)
        message = f"`{name}` is not a valid dim name" if name else "missing dim name"
        hint = _meant(text) or _NAMES_HINT
        raise SpecError(message, text, wrong_at, hint=hint)
    if name in before:
        hint = "give each dim its own name, as in `dp=2,tp=4`"
        raise SpecError(f"dim `{name}` is named twice", text, position, name, hint=hint)
    return name


class _Sizes:
    """The sizes in a text, at most one of them open."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.found: list[int] = []
        self.bounds: tuple[int, int | None] | None = None

    def read(self, position: int, item: str) -> None:
        """Add a size: a number, ``-1``, ``auto``, or a range.

        Raises:
            SpecError: If it is none of these, or a second open size.
        """
        is_range = _RANGE.fullmatch(item)
        if not (is_range or _SIZE.fullmatch(item)):
            message = f"`{item}` is not a size" if item else "missing size"
            hint = _meant(self._text) if item else None
            raise self._error(message, position, item, hint or _SIZES_HINT)
        is_open = is_range or item in ("auto", str(INFERRED))
        if is_open and INFERRED in self.found:
            message = "only one size can be inferred, found two"
            raise self._error(message, position, item, "replace one of them with a number")
        if is_range:
            self.bounds = self._bounds(position, item, is_range[1], is_range[2])
        self.found.append(INFERRED if is_open else self._number(position, item, item))

    def _bounds(self, position: int, item: str, least: str, most: str) -> tuple[int, int | None]:
        first = self._number(position, item, least)
        last = self._number(position, item, most) if most else None
        if last is not None and last < first:
            hint = f"write `{last}:{first}`"
            raise self._error(f"the range `{item}` is reversed", position, item, hint)
        return first, last

    def _number(self, position: int, item: str, digits: str) -> int:
        if len(digits) >= _TOO_LONG and not digits.startswith("-"):
            hint = f"use at most {_TOO_LONG - 1} digits"
            raise self._error(f"{digits} is too large", position, item, hint)
        if len(digits) >= _TOO_LONG or int(digits) < 1:
            hint = "use 1 for an unused dim, or `-1` to infer the size"
            raise self._error(f"a size must be at least 1, found {digits}", position, item, hint)
        return int(digits)

    def _error(self, message: str, position: int, item: str, hint: str) -> SpecError:
        return SpecError(message, self._text, position, item, hint=hint)
