"""Plugins of installed packages, found without importlib.metadata; broken ones are named."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from meshrun.cluster import ClusterFacts
from meshrun.cluster.here import detect_here
from meshrun.errors import UsageError
from meshrun.host.entry_points import entry_points
from meshrun.plan.hostfile import Host
from meshrun.plan.request import RemoteHosts
from meshrun.ssh.remote_command import find_starter
from tests.plans import request_of


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path for packages, and an empty environment."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    return tmp_path


def install(site: Path, name: str, entries: str, code: str = "") -> None:
    info = site / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(entries)
    (site / f"{name}.py").write_text(code)


def test_entry_points_are_those_of_importlib() -> None:
    """For the packages that are installed here."""
    for group in ("console_scripts", "pytest11", "torch.backends", "torchrun.logs_specs"):
        theirs = {each.name: each.value for each in importlib.metadata.entry_points(group=group)}
        assert entry_points(group) == theirs, group


def test_a_detector_is_asked_first(site: Path) -> None:
    """Two packages can each have their own."""
    code = "from meshrun.cluster import ClusterFacts\ndef detect(here):\n    " + (
        "if here.env.get(NAME):\n        return ClusterFacts(system=NAME, evidence='x', job_id='7',"
        " nnodes=2, node_rank=1, coordinator=('a',), port=1)\n"
    )
    for name in ("PLUGA", "PLUGB"):
        entry = (
            f"[meshrun.clusters]\n# a comment\n{name} = {name.lower()}:detect\n\n[other]\nx = y\n"
        )
        install(site, name.lower(), entry, f"NAME = {name!r}\n{code}")
    os.environ.update(PLUGA="1", JOB_COMPLETION_INDEX="3")
    facts = detect_here(collective=False)

    assert isinstance(facts, ClusterFacts)
    assert (facts.system, dict(facts.variables)) == ("PLUGA", {"PLUGA": "1"})
    assert "Kubernetes Indexed Job" in facts.notes[0]


@pytest.mark.parametrize(
    ("value", "code", "error"),
    [
        ("gone:detect", "", "cannot load the plugin `mine` .*ModuleNotFoundError"),
        ("mine:gone", "", "cannot load the plugin `mine` .*AttributeError"),
        ("mine:detect", "raise OSError('no disk')", "OSError: no disk"),
        ("mine:detect", "def detect(here): return {}", "`mine` .* dict, not ClusterFacts or None"),
        ("mine:detect", "def detect(here): here.env['X']", r"raised KeyError at .*mine\.py:1: 'X'"),
        ("mine:detect", "def detect(): pass", "raised TypeError: detect.. takes 0 positional"),
    ],
)
def test_a_broken_detector_is_named(site: Path, value: str, code: str, error: str) -> None:
    """With the package's own error."""
    sys.modules.pop("mine", None)
    install(site, "mine", f"[meshrun.clusters]\nmine = {value}\n", code)
    with pytest.raises(UsageError, match=error):
        detect_here(collective=False)


def test_what_starts_a_launcher(site: Path) -> None:
    """Starters that meshrun knows, or that a package provides."""
    code = "def command(host, line):\n    return ['acme', host, line]\n"
    install(site, "acme_run", "[meshrun.launchers]\nacme = acme_run:command\n", code)
    found = {
        name: find_starter(_remote(name))(Host("a"), "cd /; x")
        for name in ("blaunch", "qrsh", "acme", "")
    }

    assert found.pop("")[0] == "ssh"
    assert found == {
        "blaunch": ["blaunch", "a", "cd /; x"],
        "qrsh": ["qrsh", "-inherit", "a", "cd /; x"],
        "acme": ["acme", "a", "cd /; x"],
    }
    install(site, "text", "[meshrun.launchers]\nx = text:f\n", "def f(host, line): return line\n")
    with pytest.raises(UsageError, match=r"`x` .* returned str, not list or tuple"):
        find_starter(_remote("x"))(Host("a"), "x")
    with pytest.raises(UsageError, match="unknown launcher `pbsdsh`") as error:
        find_starter(_remote("pbsdsh"))
    assert "ssh, blaunch, qrsh, acme" in str(error.value.hint)


def _remote(starter: str) -> RemoteHosts:
    return RemoteHosts(hosts=(), access=replace(request_of().access, starter=starter))
