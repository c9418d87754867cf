"""The distributions: built, checked, installed and run as users do."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import meshrun
from meshrun.wording import DOCS
from tests.kit import ROOT

HERE = Path(__file__).parent
NEEDS = "needs the extra `package`"


def run(*words: str | Path, **kwargs: object) -> str:
    """Return what a command prints; it must succeed."""
    ended = subprocess.run(  # type: ignore[call-overload]
        [str(word) for word in words], capture_output=True, text=True, check=False, **kwargs
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return str(ended.stdout)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of what git tracks, and the wheel built from it."""
    pytest.importorskip("build", reason=NEEDS)
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in run("git", "ls-files", cwd=ROOT).splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", built, source)
    return built


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of a new environment with the wheel; its requirements come from this one."""
    home = tmp_path_factory.mktemp("home")
    run(sys.executable, "-m", "venv", "--without-pip", home)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    here = [folder for folder in sys.path if folder.endswith("site-packages")]
    (packages / "required.pth").write_text("\n".join(here) + "\n")
    pip = (sys.executable, "-m", "pip", "--python", home / "bin" / "python")
    run(*pip, "install", "--no-deps", "--no-index", next(dist.glob("*.whl")))
    return home / "bin"


def contents(dist: Path) -> tuple[set[str], set[str]]:
    """Return the files of the wheel and of the sdist."""
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        in_wheel = set(wheel.namelist())
    with tarfile.open(next(dist.glob("*.tar.gz"))) as sdist:
        return in_wheel, {name.partition("/")[2] for name in sdist.getnames()}


@pytest.mark.nightly
def test_the_distributions_are_complete(dist: Path) -> None:
    """Each module, the types, the license and the manual page, without the tests."""
    in_wheel, in_sdist = contents(dist)
    tracked = set(run("git", "ls-files", "meshrun", cwd=ROOT).splitlines())
    below = f"meshrun-{meshrun.__version__}."

    assert tracked <= in_wheel
    assert (
        tracked
        | {*("LICENSE", "README.md", "docs/reference/meshrun.1", "docs/package_metadata.py")}
        <= in_sdist
    )
    assert in_wheel - tracked - {name for name in in_wheel if name.startswith(below)} == set()
    assert {f"{below}dist-info/licenses/LICENSE", f"{below}data/data/share/man/man1/meshrun.1"} <= (
        in_wheel
    )


@pytest.mark.nightly
def test_their_metadata_is_accepted_by_an_index(dist: Path) -> None:
    """Links and images work there, and users get no tools for building or testing."""
    pytest.importorskip("twine", reason=NEEDS)
    markdown = pytest.importorskip("readme_renderer.markdown", reason=NEEDS)
    run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        text = wheel.read(f"meshrun-{meshrun.__version__}.dist-info/METADATA").decode()
    metadata = message_from_string(text)
    readme = str(markdown.render(metadata.get_payload()))
    required = [
        re.split(r"[^\w-]", line)[0]
        for line in metadata.get_all("Requires-Dist", [])
        if "extra ==" not in line
    ]

    links = re.findall(r'(?:href|src)="([^#"][^"]*)"', readme)
    assert [link for link in links if not link.startswith(DOCS)] == []
    assert len(re.findall("<img ", readme)) == 2
    assert metadata["Version"] == meshrun.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert required == [
        "torch",
        "rich",
        "psutil",
        "threadpoolctl",
        "cloudpickle",
        "msgspec",
    ]


@pytest.mark.torch
@pytest.mark.nightly
def test_the_wheel_runs(installed: Path, tmp_path: Path) -> None:
    """As a command and as a module, in an environment without anything else of this checkout."""
    (tmp_path / "hello.py").write_text(
        "from meshrun import current_mesh\nprint(tuple(current_mesh().shape))\n"
    )
    python = installed / "python"
    where = run(python, "-c", "import meshrun; print(meshrun.__file__)", cwd=tmp_path)
    launch = ("--mesh", "dp=2", "--device", "cpu", "hello.py")

    assert Path(where).is_relative_to(installed.parent)
    assert (installed.parent / "share" / "man" / "man1" / "meshrun.1").is_file()
    for command in ((installed / "meshrun",), (python, "-m", "meshrun")):
        assert run(*command, "--version", cwd=tmp_path) == f"meshrun {meshrun.__version__}\n"
    assert sorted(run(installed / "meshrun", *launch, cwd=tmp_path).splitlines()) == [
        "[dp0] (2,)",
        "[dp1] (2,)",
    ]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_wheel_passes_the_unit_tests(installed: Path, tmp_path: Path) -> None:
    """Without the checkout's own package."""
    for name in ("tests", "docs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    code = "import meshrun, pathlib; print(pathlib.Path(meshrun.__file__).parent)"
    assert Path(run(installed / "python", "-c", code, cwd=tmp_path)).is_relative_to(
        installed.parent
    )
    run(installed / "python", "-m", "pytest", "-q", "tests/unit", cwd=tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_user_s_file_is_type_checked(checker: str, installed: Path, tmp_path: Path) -> None:
    """Against the types of the installed package; the only error is the user's."""
    pytest.importorskip(checker, reason=NEEDS)
    shutil.copy(HERE / "typed.py", tmp_path)
    python = installed / "python"
    words = {
        "mypy": ["--strict", "--python-executable", python, "--cache-dir", tmp_path],
        "pyright": ["--pythonpath", python],
    }
    ended = subprocess.run(
        [sys.executable, "-m", checker, *words[checker], "typed.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    errors = re.findall(r"typed\.py:(\d+)(?::\d+)?\S* (?:- )?error: .*", ended.stdout)
    (line,) = (
        number
        for number, text in enumerate((HERE / "typed.py").read_text().splitlines(), 1)
        if "an error of each checker" in text
    )

    assert set(errors) == {str(line)}, ended.stdout + ended.stderr


def test_importing_costs_little() -> None:
    """Only the standard library, and little of it: 4 ms, of which typing takes 3."""
    code = "import sys; known = set(sys.modules); import meshrun; print(*set(sys.modules) - known)"
    words = run(sys.executable, "-S", "-c", code, cwd=ROOT).split()
    imported = {word.partition(".")[0] for word in words}

    assert imported - sys.stdlib_module_names == {"meshrun"}
    assert "typing" in imported
    assert len(imported) <= 40, sorted(imported)
