"""Classes of immutable values behave as those of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import meshrun.host.values


def _outcomes(
    dataclass: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], object]]:
    """Yield what may be done with a value of a class that ``dataclass`` makes."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Pair:
        __qualname__ = "Pair"
        left: int
        right: int = 2
        note: str = dataclasses.field(default="", compare=False)
        secret: str | None = dataclasses.field(default=None, repr=False)
        made: list[int] = dataclasses.field(default_factory=list, compare=False)
        total: int = dataclasses.field(init=False, compare=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "total", self.left + self.right)

    @dataclass(frozen=True, slots=True)
    class Shown:
        value: Any

        def __repr__(self) -> str:
            return "shown"

    monkeypatch.setitem(globals(), "Pair", Pair)  # where pickle looks for it
    one = Pair(left=1, secret="s")
    yield lambda: repr([one, Shown(3)])
    yield lambda: one == dataclasses.replace(one, note="x")
    yield lambda: [dataclasses.replace(one, **{name: 3}) == one for name in ("left", "secret")]
    yield lambda: [one == (1, 2, "s"), Shown(1) == Shown(1), Shown(1) == Shown(2)]
    yield lambda: len({one, copy.copy(one), copy.deepcopy(one)})
    yield lambda: hash(Shown([]))
    yield lambda: dataclasses.asdict(pickle.loads(pickle.dumps(one)))
    yield Pair
    yield lambda: setattr(one, "left", 3)
    yield lambda: delattr(one, "left")


def test_a_class_of_values_behaves_as_a_dataclass(monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(outcome: Callable[[], object]) -> object:
        try:
            return outcome()
        except TypeError as error:
            return str(error).rpartition(".")[2]
        except AttributeError:
            return AttributeError

    standard, ours = (
        [attempt(each) for each in _outcomes(module.dataclass, monkeypatch)]
        for module in (dataclasses, meshrun.host.values)
    )
    assert ours == standard
    assert AttributeError in standard
