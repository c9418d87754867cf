"""The pytest plug-in: tests run on persistent ranks, and each is reported as one test."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.terminal import Terminal

pytestmark = pytest.mark.torch

FEW = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Otherwise each rank imports all plug-ins that are installed."""
PLUG_INS = "-p meshrun.api.pytest_plugin -p pytest_timeout -p xdist.plugin"

GOOD = """
import os, threading, warnings
import pytest
import torch
from hypothesis import given, settings, strategies
import torch.distributed as dist
from meshrun.testing import assert_same_on_all_ranks, rank_seed

pytestmark = pytest.mark.mesh("dp=2")
PIDS = []


def test_fixtures(mesh, rank, layout, tmp_path):
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=mesh.get_group("dp"))
    assert total.item() == 1 and layout.world_size == 2
    (tmp_path / "own").mkdir()
    PIDS.append(os.getpid())


@pytest.mark.parametrize("n", range(3))
def test_ranks_stay(n):
    assert PIDS == [os.getpid()]


class TestClass:
    made = 0

    @pytest.fixture(scope="class")
    @classmethod
    def shared(cls):
        cls.made += 1
        yield cls.made
        cls.made = -1

    def test_one(self, shared):
        assert shared == 1

    def test_two(self, shared):
        assert shared == 1


@settings(max_examples=5, deadline=None, database=None)
@given(strategies.integers())
def test_examples_are_the_same(drawn):
    assert_same_on_all_ranks(drawn)


def test_skips():
    pytest.importorskip("no_such_module")


def test_skips_on_one(rank):
    if rank == 1:
        pytest.skip("not here")


@pytest.mark.xfail(strict=True)
def test_fails_as_expected(rank):
    assert rank == 7


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.mesh("dp=2", device="cuda")
def test_needs_a_gpu():
    pass


def test_same(rank):
    assert_same_on_all_ranks({"x": torch.ones(2)})
    state = {"name": "adam", "parts": [torch.ones(2), ("x", None)]}
    assert_same_on_all_ranks(state)
    for other in ({**state, "parts": [torch.ones(2) * rank, 1, "x"]}, {**state, str(rank): 0}):
        with pytest.raises(AssertionError, match="rank 1 differs from rank 0"):
            assert_same_on_all_ranks(other)
    with pytest.raises(AssertionError, match="rank 1 differs from rank 0"):
        assert_same_on_all_ranks([rank])
    with pytest.raises(AssertionError, match="rank 1 differs from rank 0"):
        assert_same_on_all_ranks(f"rank {rank}")
    assert_same_on_all_ranks(rank_seed(3, "dp") - rank)
    assert_same_on_all_ranks(torch.initial_seed() - rank)


def test_leaves_something(rank):
    warnings.warn("careful")
    held = threading.Event()
    threading.Thread(target=held.wait, name="left over", daemon=True).start()


def test_leaves_nothing():
    dist.destroy_process_group(dist.new_group([0, 1]))
    threading.Timer(0.02, print).start()

    class WithoutTimeout(threading.Thread):
        def join(self):
            super().join()

    WithoutTimeout(target=threading.Event().wait, args=(0.02,)).start()


def test_forks():
    if os.fork() == 0:
        return
    os.wait()


@pytest.mark.mesh("dp=2", timeout=60)
@pytest.mark.parametrize("mesh", ["dp=1"], indirect=True)
def test_parameters_come_first(mesh):
    assert mesh.size() == 1


def test_after_all():
    assert PIDS == [os.getpid()]


def test_ends_the_group():
    dist.destroy_process_group()


def test_has_another_group(mesh):
    dist.all_reduce(torch.ones(1), group=mesh.get_group())
"""

BAD = """
import os, sys, time
import pytest
import torch.distributed as dist


@pytest.mark.mesh("dp=2")
def test_all_differ(rank):
    print("on", rank)
    assert {"rank": rank} == {"rank": 7}


@pytest.mark.mesh("dp=2,tp=x")
def test_bad_spec():
    pass


@pytest.mark.mesh("dp=2", devise="cpu")
def test_bad_word():
    pass


def test_no_ranks(mesh):
    pass


@pytest.mark.mesh
def test_with_a_mark_of_another_package():
    pass


@pytest.fixture
def broken(rank):
    if rank == 1:
        raise ValueError("broken")


@pytest.mark.mesh("dp=2")
def test_broken_fixture(broken):
    pass


@pytest.mark.mesh("dp=2")
@pytest.mark.xfail(reason="known")
def test_expected_to_break(broken):
    pass


@pytest.mark.mesh("dp=2")
def test_goes_on(rank):
    pass
"""


WORSE = """
import os, sys, time
import pytest
import torch.distributed as dist


@pytest.mark.mesh("dp=2")
def test_one_fails(rank):
    if rank == 1:
        assert rank == 7
    dist.barrier()


@pytest.mark.mesh("dp=2")
def test_one_dies(rank):
    if rank == 1:
        os._exit(3)
    dist.barrier()


@pytest.mark.mesh("dp=2", timeout=0.5)
def test_hangs(rank):
    time.sleep(1000)


@pytest.mark.mesh("dp=2")
def test_leaves():
    sys.exit(5)


@pytest.mark.mesh("dp=2")
def test_ends_the_session(rank):
    if rank == 1:
        pytest.exit("enough", returncode=1)
    dist.barrier()


def test_is_not_reached():
    pass
"""


ALIKE = """
import os
import unittest
import pytest


def test_all_parts_pass(subtests):
    for _ in range(2):
        with subtests.test("the same"):
            pass


def test_a_cache(request):
    key = f"found/{os.environ.get('RANK')}"  # all ranks have one cache
    request.config.cache.set(key, 1)
    assert request.config.cache.get(key, 0) == 1


def test_part(subtests):
    for name in "abc":
        with subtests.test(name):
            assert name != "b"


def test_after_a_failure():
    pass


class TestParts(unittest.TestCase):
    def test_its_parts(self):
        for name in "abc":
            with self.subTest(name):
                self.assertNotEqual(name, "b")
"""


def run_pytest(folder: Path, text: str, *words: str) -> tuple[dict[str, ET.Element], str]:
    """Return each test's element in the JUnit XML, and the output."""
    (folder / "test_ranks.py").write_text(text)
    (folder / "pytest.ini").write_text(f"[pytest]\naddopts = -p no:cacheprovider {PLUG_INS}\n")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "--junitxml=found.xml", "test_ranks.py", *words],
        cwd=folder,
        env={**os.environ, **FEW},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    cases = ET.parse(folder / "found.xml").iter("testcase")
    return {case.attrib["name"]: case for case in cases}, ran.stdout


def outcome(case: ET.Element) -> str:
    """Return failure, error, skipped or passed."""
    found = [part.tag for part in case if part.tag in ("failure", "error", "skipped")]
    return found[0] if found else "passed"


def test_tests_run_on_ranks_that_stay(tmp_path: Path) -> None:
    cases, output = run_pytest(tmp_path, GOOD, "-p", "_hypothesis_pytestplugin")
    skipped = {"test_skips", "test_fails_as_expected", "test_needs_a_gpu"}

    assert {name for name, case in cases.items() if outcome(case) == "skipped"} == skipped
    assert {outcome(case) for case in cases.values()} == {"passed", "skipped"}, output
    assert len(cases) == 19
    assert output.count("UserWarning: careful") == 1
    assert "the test left behind 1 thread (left over)" in output
    assert output.count("left behind") == 1, output
    assert output.count("the test destroyed the process group; later tests get new ranks") == 1


def test_ordinary_tests_import_no_other_package(tmp_path: Path) -> None:
    """pytest loads the plug-in in every project, whose own modules may have the name of one."""
    for name in ("msgspec", "psutil", "rich", "torch"):
        (tmp_path / f"{name}.py").write_text("raise ImportError")
    cases, output = run_pytest(tmp_path, "def test_it():\n    pass\n")

    assert [outcome(case) for case in cases.values()] == ["passed"], output


@pytest.mark.nightly
def test_outcomes_are_the_same_as_without_ranks(tmp_path: Path) -> None:
    """Including subtests and pytest's cache, which ranks do not overwrite."""
    (tmp_path / "test_alike.py").write_text(ALIKE)
    mark = "pytestmark = pytest.mark.mesh('dp=2')"
    (tmp_path / "test_ranks.py").write_text(f"{ALIKE}\n{mark}\n")

    def outcomes(name: str, *words: str) -> list[str]:
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-rA", *words, name],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        lines = [line.replace(name, "") for line in ran.stdout.splitlines() if f" {name}::" in line]
        assert lines, ran.stdout + ran.stderr
        return sorted(lines)

    alone, failed = outcomes("test_alike.py"), outcomes("test_alike.py", "--lf")
    assert sum("failed" in line.lower() for line in alone) == 3, alone
    assert outcomes("test_ranks.py", "--cache-clear") == alone
    assert outcomes("test_ranks.py", "--lf") == failed


PLUG_IN = """
import pytest


def pytest_addoption(parser):
    parser.addoption("--seed", default=3)


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        assert config.workerinput["seed"] == 3
        assert config.workerinput["place"] == 5, "another place"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["place"] = PLACE
    node.gateway.id  # ranks have none
"""


@pytest.mark.parametrize("place", [5, pytest.param(6, marks=pytest.mark.nightly)])
def test_plug_ins_treat_a_rank_like_a_worker_of_xdist(place: int, tmp_path: Path) -> None:
    """A rank gets what they send to workers; if a plug-in fails on a rank, the error says why."""
    (tmp_path / "conftest.py").write_text(PLUG_IN.replace("PLACE", str(place)))
    text = "import pytest\n@pytest.mark.mesh('dp=2')\ndef test_it(rank):\n    pass\n"
    cases, output = run_pytest(tmp_path, text, "-W", "error")

    assert outcome(cases["test_it"]) == ("passed" if place == 5 else "error"), output
    assert ("AssertionError: another place" in output) == (place == 6)


def test_each_failure_is_reported_once(tmp_path: Path) -> None:
    """With the traceback of the rank that failed, and a line for each of the others."""
    cases, output = run_pytest(tmp_path, BAD)
    details = {name: "".join(case.itertext()) for name, case in cases.items()}
    found = {name: outcome(case) for name, case in cases.items()}

    assert found.pop("test_goes_on") == "passed", output
    assert found.pop("test_with_a_mark_of_another_package") == "passed", output
    assert found.pop("test_expected_to_break") == "skipped", output
    assert ", 2 passed, 1 xfailed, " in output, "each test counts once"
    errors = {name for name, ended in found.items() if ended == "error"}
    assert errors == {"test_bad_spec", "test_bad_word", "test_no_ranks", "test_broken_fixture"}
    assert {found[name] for name in found.keys() - errors} == {"failure"}
    assert "{'rank': 7}" in details["test_all_differ"], "assertions must be rewritten on ranks"
    assert "Captured stdout call [dp0]" in output
    assert "ValueError: broken" in details["test_broken_fixture"]
    assert "`x` is not a size" in details["test_bad_spec"]
    assert "@pytest.mark.mesh got an unexpected" in details["test_bad_word"]
    assert "'devise'" in details["test_bad_word"]
    assert "the fixture `mesh` needs ranks" in details["test_no_ranks"]


EXPECTED = """
import pytest
import torch.distributed as dist

pytestmark = [pytest.mark.mesh("dp=2", device="cpu"), pytest.mark.xfail(strict=True)]


@pytest.mark.parametrize("failing", [0, 1])
def test_one_fails(rank, failing):
    assert rank != failing


def test_one_fails_and_another_waits(rank):
    assert rank == 0
    dist.barrier()


def test_none_fails():
    pass
"""


@pytest.mark.nightly
def test_an_expected_failure_may_happen_on_any_rank(tmp_path: Path) -> None:
    """The other ranks stop as after any failure."""
    cases, output = run_pytest(tmp_path, EXPECTED)
    found = {name: outcome(case) for name, case in cases.items()}

    assert found.pop("test_none_fails") == "failure"
    assert set(found.values()) == {"skipped"}, output
    assert "1 failed, 3 xfailed" in output


@pytest.mark.nightly
def test_ranks_that_end_or_hang_are_reported(tmp_path: Path) -> None:
    cases, output = run_pytest(tmp_path, WORSE)
    details = {name: "".join(case.itertext()) for name, case in cases.items()}

    assert {outcome(case) for case in cases.values()} == {"failure"}, output
    assert "dp1 failed; not finished: dp0" in output
    assert "barrier at" in output
    assert "error: rank 1 [dp1] exited with code 3" in details["test_one_dies"]
    parts = output.replace(" (shown above)", "").split("- Ranks -")[1:]
    ranks = [part.splitlines()[1:3] for part in parts]
    assert ranks == [
        ["dp0: did not finish", "dp1: failed: assert 1 == 7"],
        ["dp0: did not finish", "dp1: exited with code 3"],
        ["dp0: did not finish", "dp1: did not finish"],
        ["dp0: failed: SystemExit: 5", "dp1: failed: SystemExit: 5"],
    ], output
    assert "timed out after 0.5 s; not finished: dp0, dp1" in details["test_hangs"]
    assert "in test_hangs" in details["test_hangs"]
    assert "SystemExit: 5" in details["test_leaves"]
    assert "Exit: enough" in output
    assert not {"test_ends_the_session", "test_is_not_reached"} & {*cases}


@pytest.mark.nightly
@pytest.mark.parametrize("words", [["-n", "2"], ["-x"], ["--meshrun", "dp=2"]])
def test_with_other_options(words: list[str], tmp_path: Path) -> None:
    """Each worker of pytest-xdist has its own ranks; -x ends after the first failure."""
    text = BAD[: BAD.index("@pytest.mark.mesh", BAD.index("test_all_differ"))] + (
        "def test_plain(mesh, rank):\n    assert mesh.size() == 2\n"
    )
    cases, output = run_pytest(tmp_path, text, *words)
    found = {name: outcome(case) for name, case in cases.items()}

    assert found["test_all_differ"] == "failure", output
    assert len(found) == (1 if words == ["-x"] else 2)
    if "-x" not in words:
        assert found["test_plain"] == ("passed" if "--meshrun" in words else "error")


MARKS = """
import os
import time
import pytest
import torch.distributed as dist


@pytest.fixture(scope="session")
def shared():
    yield


@pytest.mark.mesh("dp=2", timeout="90s")
def test_first(rank, shared):
    print(f"shown by {rank}", flush=True)


def test_between():
    pass


@pytest.mark.mesh("dp=2")
def test_second(rank, shared):
    pass


@pytest.mark.mesh("dp=2", timeout="soon")
def test_bad_time(rank):
    pass


@pytest.mark.mesh("dp=2", cwd="/nonexistent")
def test_bad_folder(rank):
    pass


@pytest.mark.mesh("dp=2", cwd="/")
def test_folder(rank):
    assert os.getcwd() == "/"


@pytest.mark.mesh("dp=2", timeout=2)
def test_hangs(rank):
    print(f"said by {rank}")
    time.sleep(1000 if rank else 0)


@pytest.mark.mesh("dp=2")
@pytest.mark.timeout(0.5, method="thread", func_only=True)
def test_is_limited(rank):
    dist.barrier() if rank else time.sleep(1000)


def test_after_all():
    pass
"""


@pytest.mark.nightly
def test_arguments_of_marks(tmp_path: Path) -> None:
    """A mistake is an error of that test only; output of ranks that have finished is kept.

    A limit of pytest-timeout ends only its test too.
    """
    setups = tmp_path / "setups"
    made = f"    open({str(setups)!r}, 'a').write('x')\n    yield"
    cases, output = run_pytest(tmp_path, MARKS.replace("    yield", made))
    details = {name: "".join(case.itertext()) for name, case in cases.items()}
    found = {name: outcome(case) for name, case in cases.items()}

    assert {name for name, ended in found.items() if ended == "error"} == {
        "test_bad_time", "test_bad_folder",
    }, output  # fmt: skip
    assert {name for name, ended in found.items() if ended == "failure"} == {
        "test_hangs", "test_is_limited",
    }  # fmt: skip
    assert found["test_after_all"] == "passed"
    assert "timed out after 0.5 s; not finished: dp0, dp1" in details["test_is_limited"]
    assert "barrier at" in details["test_is_limited"]
    assert "expects a time, found `soon`" in details["test_bad_time"]
    assert "/nonexistent" in details["test_bad_folder"]
    assert output.count("said by 0") == 1
    assert float(cases["test_hangs"].attrib["time"]) >= 2
    assert "\ndp0: passed\ndp1: did not finish\n" in output
    assert setups.read_text() == "xx", "a session fixture must be set up once on each rank"


@pytest.mark.nightly
@pytest.mark.parametrize("words", [["-s"], ["--setup-show"], ["--setup-plan"], ["--log-file=l"]])
def test_options_of_output(words: list[str], tmp_path: Path) -> None:
    """They apply to ranks, and output that is not captured is shown."""
    text = MARKS[: MARKS.index('@pytest.mark.mesh("dp=2", timeout="soon")')]
    cases, output = run_pytest(tmp_path, text, *words)

    assert {outcome(case) for case in cases.values()} == {"passed"}, output
    assert ("[dp1] shown by 1" in output) == (words == ["-s"])


RUNS_TESTS = """
import pytest
from _pytest.runner import runtestprotocol


def pytest_runtest_protocol(item, nextitem):
    if "again" not in item.name:
        return None
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if any(report.failed for report in reports):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    return True


class Retries:
    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if "retried" not in item.name or call.when != "call" or call.excinfo is None:
            return report
        item.ihook.pytest_runtest_teardown(item=item, nextitem=None)
        item._initrequest()
        item.ihook.pytest_runtest_setup(item=item)
        call = pytest.CallInfo.from_call(lambda: item.ihook.pytest_runtest_call(item=item), "call")
        return pytest.TestReport.from_item_and_call(item, call)


def pytest_configure(config):
    if config.pluginmanager.register(Retries(), "pytest-retry"):
        config.addinivalue_line("markers", "flaky: run again")
"""

PREPARES_TESTS = """
pytest_plugins = ["runs_tests"]


def pytest_runtest_protocol(item):
    item.is_noted = True


def pytest_runtest_setup(item):
    import torch.distributed as dist

    assert item.is_noted
    assert dist.is_initialized()
"""

RUN_AGAIN = """
import pathlib
import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.mesh("dp=2")


def times(name, rank):
    file = pathlib.Path(__file__).with_name(f"{name}{rank}")
    with file.open("a") as end:
        end.write("x")
    return len(file.read_text())


@pytest.mark.flaky
@pytest.mark.parametrize("name", ["again", "retried"])
def test_it(name, rank):
    assert times(name, rank) > 1 or rank == 0
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == 2


def test_fails_again(rank):
    assert times("fails", rank) == 7


@pytest.mark.skipif("no such condition")
def test_bad_condition():
    pass
"""


@pytest.mark.nightly
def test_plug_ins_that_rerun_a_test_rerun_it_on_all_ranks(tmp_path: Path) -> None:
    """In the way of pytest-rerunfailures and flaky, and in that of pytest-retry.

    Hooks of a ``conftest.py`` run only on the ranks.
    """
    (tmp_path / "runs_tests.py").write_text(RUNS_TESTS)
    (tmp_path / "conftest.py").write_text(PREPARES_TESTS)
    cases, output = run_pytest(tmp_path, RUN_AGAIN, "--strict-markers")
    found = {name: outcome(case) for name, case in cases.items()}

    assert found == {
        "test_it[again]": "passed",
        "test_it[retried]": "passed",
        "test_fails_again": "failure",
        "test_bad_condition": "error",
    }, output
    runs = {file.name: file.read_text() for file in tmp_path.glob("*[01]")}
    assert runs == {
        f"{name}{rank}": "xx" for name in ("again", "retried", "fails") for rank in "01"
    }
    assert output.count("dp1: failed") == 1, "only the last run of a test must be reported"


DEBUGGED = """
import pytest
import torch.distributed as dist


@pytest.mark.mesh("dp=2", device="cpu", timeout=1)
def test_fails(rank):
    secret = rank * 10 + 7
    print("printed on", rank)
    for n in range(2 * rank):
        breakpoint()
        print("at", n)
    assert secret != 17
    dist.barrier()


@pytest.mark.mesh("dp=2", device="cpu")
def test_all_fail(rank):
    assert rank == 7


@pytest.mark.mesh("dp=2", device="cpu")
def test_never(rank):
    pass
"""


def debug_tests(tmp_path: Path, text: str, *typed: str) -> list[str]:
    """Run pytest --pdb in a terminal, type a line at each prompt, and return all lines shown."""
    (tmp_path / "test_it.py").write_text(text)
    words = ["-p", "no:cacheprovider", *PLUG_INS.split(), "--pdb", str(tmp_path)]
    terminal = Terminal([sys.executable, "-m", "pytest", *words], FEW, columns=100, rows=40)
    try:
        for prompts, line in enumerate(typed, 1):
            terminal.wait_for("(Pdb)", prompts)
            terminal.type(line)
        code = terminal.wait()
    finally:
        terminal.end()
    lines = terminal.all_lines
    assert code == 2
    assert any("Exit: Quitting debugger" in line for line in lines)
    assert terminal.modes_left == terminal.modes
    return lines


def test_the_first_rank_that_fails_is_debugged(tmp_path: Path) -> None:
    """With --pdb, in the terminal; the debugger handles Ctrl-C, and q ends the session."""
    text = DEBUGGED[DEBUGGED.index("@pytest.mark.mesh", DEBUGGED.index("def test_fails")) :]
    lines = debug_tests(tmp_path, f"import pytest\n{text}", "p rank + 10\n", "\x03", "q\n")

    assert lines.count("10") + lines.count("11") == 1
    assert any(line.endswith("--KeyboardInterrupt--") for line in lines)
    assert len([line for line in lines if "entering PDB on rank" in line]) == 1
    assert any("1 failed in" in line for line in lines)


@pytest.mark.nightly
def test_others_wait_for_a_debugger(tmp_path: Path) -> None:
    """At breakpoints too; time limits pause meanwhile, and the next failure is debugged as well."""
    lines = debug_tests(
        tmp_path,
        DEBUGGED,
        *("import time; time.sleep(1.5)\n", "c\n", "c\n", "p secret * 2\n", "c\n", "q\n"),
    )

    assert lines.count("34") == 1
    assert lines.count("printed on 1") == lines.count("at 0") == 2  # and once in the report
    assert len([line for line in lines if "entering PDB on rank" in line]) == 2
    assert any("; not finished: dp0" in line for line in lines)
    assert any("2 failed in" in line for line in lines)
