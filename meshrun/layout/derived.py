"""Dims derived from a mesh's own: flattened ones (``dp_cp=dp+cp``) and other factorizations.

Conversion from and to text, and checks against a mesh. Independent of machines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

from meshrun.errors import SpecError
from meshrun.host import rank_variables as var
from meshrun.layout import spec
from meshrun.layout.axes import Axis, axes_of, axis_of
from meshrun.wording import count, use_dim

_RESERVED = ("rank", "local_rank")
_FLATTEN_HINT = "write `dp_cp=dp+cp`, or `dp+cp` to name it `dp_cp`"
_VIEW_HINT = (
    "write a name and another factorization of the same ranks, such as `moe:pp=2,efsdp=-1,ep=8`"
)
_NAME_HINT = "a name starts with a letter or `_`, followed by letters, digits or `_`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flatten:
    """Dims of the mesh joined into one under another name, row-major over ``dims``."""

    name: str
    dims: tuple[str, ...]

    def __str__(self) -> str:
        """Return the canonical text, the inverse of :func:`parse_flatten`."""
        return f"{self.name}={'+'.join(self.dims)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Another factorization of the mesh's ranks; one size may be ``-1`` to be inferred."""

    name: str
    mesh: spec.MeshSpec

    def __str__(self) -> str:
        """Return the canonical text, the inverse of :func:`parse_view`."""
        return f"{self.name}:{spec.format_mesh(self.mesh)}"


# ---- text ----------------------------------------------------------------------------------


def parse_flatten(text: str) -> Flatten:
    """Parse the text of ``--flatten``.

    Raises:
        SpecError: If it cannot be parsed, with the position of the first wrong character.

    Example:
        >>> parse_flatten("dp+cp")
        Flatten(name='dp_cp', dims=('dp', 'cp'))
    """
    head, equals, body = text.rpartition("=")
    at = len(head) + len(equals)
    dims: list[str] = []
    for start, dim in spec.items_of(body, "+"):
        _check_name(text, at + start, dim, _FLATTEN_HINT)
        if dim in dims:
            raise _error(f"dim `{dim}` appears twice", text, at + start, dim)
        dims.append(dim)
    if len(dims) < 2:
        start = len(text) - len(body.lstrip())
        raise _error("cannot flatten a single dim", text, start, dims[0])
    name = "_".join(dims)
    if equals:
        name = head.strip()
        _check_name(text, len(head) - len(head.lstrip()), name, _FLATTEN_HINT)
    return Flatten(name=name, dims=tuple(dims))


def parse_view(text: str) -> View:
    """Parse the text of ``--view``.

    Raises:
        SpecError: If it cannot be parsed, with the position of the first wrong character.

    Example:
        >>> str(parse_view("moe: pp=2, ep=8").mesh)
        'pp=2,ep=8'
    """
    head, colon, body = text.partition(":")
    if not colon:
        wrong = text.strip()
        at = len(text) - len(text.lstrip())
        message = f"`{wrong}` has no name" if wrong else "the view is empty"
        raise _error(message, text, at, wrong, _VIEW_HINT)
    name = head.strip()
    _check_name(text, len(head) - len(head.lstrip()), name, _VIEW_HINT)
    at = len(head) + 1
    try:
        mesh = spec.parse_mesh(body)
    except SpecError as error:
        error.text, error.position, error.option = text, at + error.position, "--view"
        raise
    if mesh.bounds is not None:
        raise _error("a view cannot have a range", text, at, body, "write `-1` for a size to infer")
    if mesh.mesh_dim_names is None:
        start = at + len(body) - len(body.lstrip())
        raise _error("the dims of a view need names", text, start, body.strip())
    return View(name=name, mesh=mesh)


def parse_derived(
    flattens: str | Iterable[str], views: str | Iterable[str]
) -> tuple[tuple[Flatten, ...], tuple[View, ...]]:
    """Return the values of ``--flatten`` and ``--view``, each given repeatedly.

    Several in one text are separated by ``;``.

    Raises:
        SpecError: If one cannot be parsed.
    """
    return (
        tuple(parse_flatten(text) for text in spec.split_texts(flattens)),
        tuple(parse_view(text) for text in spec.split_texts(views)),
    )


def format_derived(flattens: Iterable[Flatten], views: Iterable[View]) -> dict[str, str]:
    """Return ``MESHRUN_FLATTEN`` and ``MESHRUN_VIEW`` for :func:`parse_derived`, unless empty."""
    texts = {
        var.FLATTEN: ";".join(map(str, flattens)),
        var.VIEW: ";".join(map(str, views)),
    }
    return {name: text for name, text in texts.items() if text}


# ---- fitting them to a mesh ----------------------------------------------------------------


def derive(
    mesh: spec.MeshSpec, flattens: Iterable[Flatten], views: Iterable[View]
) -> tuple[tuple[View, ...], dict[str, Axis]]:
    """Fit derived dims to a mesh.

    Args:
        mesh: The solved spec (no ``-1``).
        flattens: Joined dims, each in the mesh's order, as torch slices them.
        views: Other factorizations; dims with the same name must have the same groups.

    Returns:
        The views with all sizes known, and the derived dims by name.

    Raises:
        SpecError: If a name is taken, a dim does not exist, or the sizes do not fit.
    """
    root = dict(zip(mesh.mesh_dim_names or (), axes_of(mesh.sizes), strict=False))
    found: dict[str, Axis] = {}
    for flatten in flattens:
        _check_free(str(flatten), flatten.name, {**root, **found})
        found[flatten.name] = _joined(flatten, mesh, root)
    solved = tuple(_solve_view(view, mesh.known_size) for view in views)
    for view in solved:
        _add_view(view, root, found)
    names: set[str] = set()
    for view in solved:
        if view.name in names:
            raise _error(f"view `{view.name}` is defined twice", str(view), 0, view.name)
        _check_free(str(view), view.name, {**root, **found})
        names.add(view.name)
    return solved, found


def _joined(flatten: Flatten, mesh: spec.MeshSpec, root: dict[str, Axis]) -> Axis:
    text, at, before = str(flatten), len(flatten.name) + 1, -1
    digits: list[tuple[int, int]] = []
    for dim in flatten.dims:
        if dim not in root:
            hint = use_dim(root) or "name the dims of the mesh"
            raise _error(f"mesh `{mesh}` has no dim `{dim}`", text, at, dim, hint)
        place = list(root).index(dim)
        if place < before:
            ordered = "+".join(name for name in root if name in flatten.dims)
            hint = f"`{flatten.name}={ordered}`"
            raise _error(f"dim `{dim}` is out of order", text, at, dim, hint)
        digits += root[dim].digits
        at, before = at + len(dim) + 1, place
    return axis_of(digits)


def _solve_view(view: View, world_size: int) -> View:
    mesh = view.mesh
    if mesh.is_inferred and world_size % mesh.known_size == 0:
        dim = mesh.sizes.index(spec.INFERRED)
        return replace(view, mesh=mesh.with_size(dim, world_size // mesh.known_size))
    if mesh.is_inferred or mesh.known_size != world_size:
        workers = count(mesh.known_size, "worker")
        needs = f"{'a multiple of ' if mesh.is_inferred else ''}{workers}"
        message = f"view `{view.name}` needs {needs}, but the mesh has {world_size}"
        hint = "choose sizes whose product is the number of ranks; one may be `-1`"
        raise _error(message, str(view), len(view.name) + 1, spec.format_mesh(mesh), hint)
    return view


def _add_view(view: View, root: dict[str, Axis], found: dict[str, Axis]) -> None:
    text, at = str(view), len(view.name) + 1
    names = view.mesh.mesh_dim_names or ()
    world_size = view.mesh.known_size
    for name, size, axis in zip(names, view.mesh.sizes, axes_of(view.mesh.sizes), strict=True):
        other = root.get(name, found.get(name))
        if other is None:
            _check_free(text, name, {}, at)
            found[name] = axis
        elif other.digits != axis.digits:
            whose = "the mesh" if name in root else "another derived dim"
            mine, theirs = _shortened(axis, world_size), _shortened(other, world_size)
            message = f"dim `{name}` of view `{view.name}` has groups {mine}, but `{name}` of"
            hint = "dims with the same name must have the same groups; rename or move this one"
            raise _error(f"{message} {whose} has {theirs}", text, at, name, hint)
        at += len(f"{name}={size},")


def _check_free(text: str, name: str, taken: dict[str, Axis], at: int = 0) -> None:
    if name in _RESERVED:
        raise _error(f"`{name}` is a reserved name", text, at, name, "choose another name")
    if name in taken:
        raise _error(f"dim `{name}` already exists", text, at, name, "choose another name")


def _check_name(text: str, at: int, name: str, hint: str) -> None:
    if not spec.NAME.fullmatch(name):
        good = spec.NAME.match(name)
        message = f"`{name}` is not a valid name" if name else "missing name"
        wrong_at = at + (good.end() if good else 0)
        raise _error(message, text, wrong_at, "", _NAME_HINT if name else hint)


def _error(message: str, text: str, at: int, wrong: str, hint: str | None = None) -> SpecError:
    is_view = hint is _VIEW_HINT or ":" in text or "view" in message
    hint = hint or (_VIEW_HINT if is_view else _FLATTEN_HINT)
    option = "--view" if is_view else "--flatten"
    return SpecError(message, text, at, wrong, hint=hint, option=option)


def _shortened(axis: Axis, world_size: int) -> str:
    """Return the first groups, shortened: ``{0,1,..,7} {8,9,..,15} ..``."""
    groups = list(islice(axis.groups(world_size), 3))
    shown = " ".join(shortened_group(group) for group in groups[:2])
    return shown + (" .." if len(groups) > 2 else "")


def shortened_group(group: range | list[int]) -> str:
    """Return a group's ranks, without the middle if there are many: ``{0,1,..,7}``."""
    if len(group) <= 4:
        return "{" + ",".join(map(str, group)) + "}"
    return f"{{{group[0]},{group[1]},..,{group[-1]}}}"
