"""A rank's coordinate: a tuple of integers with attributes named after the dims."""

from __future__ import annotations

from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

from meshrun.layout.spec import MeshSpec


class Coordinate(tuple[int, ...]):
    """One integer per dim, slowest first; equal to the plain tuple, and pickled as one.

    Example:
        >>> coordinate_type(("dp", "tp"))((1, 3)).tp
        3
    """

    __slots__ = ()
    mesh_dim_names: ClassVar[tuple[str, ...] | None] = None

    def __repr__(self) -> str:
        if self.mesh_dim_names is None:
            return tuple.__repr__(self)
        pairs = zip(self.mesh_dim_names, self, strict=True)
        return f"Coordinate({', '.join(f'{name}={index}' for name, index in pairs)})"

    def __reduce__(self) -> Any:
        return tuple, (tuple(self),)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> int: ...


@lru_cache(maxsize=256)
def coordinate_type(names: tuple[str, ...] | None) -> type[Coordinate]:
    """Return the type of coordinates on dims with these names; ``None`` for dims without names."""
    if names is None:
        return Coordinate
    # A dim called `index` or `count` does not shadow tuple's method.
    getters = {
        name: property(itemgetter(place))
        for place, name in enumerate(names)
        if not hasattr(Coordinate, name)
    }
    return type("Coordinate", (Coordinate,), {"__slots__": (), "mesh_dim_names": names, **getters})


@lru_cache(maxsize=256)
def label_template(mesh: MeshSpec) -> str:
    """Return a format for coordinates with a fixed width: ``dp{:02d}_tp{:01d}``."""
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    return "_".join(
        # A hyphen separates a name that ends in a digit from its index.
        f"{name}{'-' if name[-1:].isdigit() else ''}{{:0{len(str(size - 1))}d}}"
        for name, size in zip(names, mesh.sizes, strict=True)
    )
