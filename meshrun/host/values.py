"""``dataclass`` as in ``dataclasses``, but classes of immutable values take a third of the time.

A launch makes 140 of them before its first rank starts. For each, the standard one compiles six
functions; here one is compiled, and the others are closures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    import dataclasses
    from operator import attrgetter

    def dataclass(**options: bool) -> Any:
        """Return the decorator of ``dataclasses``; with slots and frozen, the quick one."""
        kw_only = options.pop("kw_only", False)
        if options != {"frozen": True, "slots": True}:
            return dataclasses.dataclass(kw_only=kw_only, **options)
        decorate = dataclasses.dataclass(slots=True, kw_only=kw_only, repr=False, eq=False)
        return lambda cls: _immutable(decorate(cls))

    def _immutable(cls: type) -> type:
        fields = dataclasses.fields(cls)
        shown = [field.name for field in fields if field.repr]
        key = attrgetter("__class__", *(field.name for field in fields if field.compare))

        def show(self: Any) -> str:
            values = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
            return f"{type(self).__qualname__}({values})"

        def equal(self: Any, other: object) -> bool:
            return key(self) == key(other) if type(other) is type(self) else NotImplemented

        methods = {
            "__repr__": show,
            "__eq__": equal,
            "__hash__": lambda self: hash(key(self)),
            "__setattr__": _set_once,
            "__delattr__": _keep,
        }
        for name, method in methods.items():
            if vars(cls).get(name) is None:
                setattr(cls, name, method)
        return cls

    def _set_once(self: Any, name: str, value: object) -> None:
        if hasattr(self, name):
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        object.__setattr__(self, name, value)

    def _keep(_: Any, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


__all__ = ["dataclass"]
