"""Whether torch is asked for devices that a package adds."""

from __future__ import annotations

import sys

import pytest

from meshrun.host.machine import HostFacts
from meshrun.plan import surroundings
from tests.kit import FAKES


@pytest.mark.parametrize(
    ("kind", "autoload", "modules", "is_asked"),
    [
        ("auto", "1", [], True),
        ("auto", "0", [], False),
        ("auto", "0", ["mine"], False),
        ("auto", "0", ["mine", "torch_sim"], True),
        ("sim", "0", [], False),
        ("sim", "0", ["mine"], True),
        ("mps", "0", [], True),
    ],
)
def test_torch_is_asked_if_a_package_may_have_added_devices(
    kind: str, autoload: str, modules: list[str], is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking takes seconds, so with `auto` any other module is taken to add none."""
    monkeypatch.syspath_prepend(FAKES / "back_end")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", autoload)
    answer = [sys.executable, "-c", "print('[\"sim\", 2]')"]
    monkeypatch.setattr(surroundings, "own_command", lambda *_: answer)
    bare = HostFacts(hostname="here", usable_cores=2, accelerator=None, accelerator_count=0)
    facts = surroundings.count_with_torch(bare, kind, modules, None)

    assert facts.accelerator_count == (2 if is_asked else 0)
