"""The pytest plug-in: runs tests that have a mesh on ranks, which the next tests reuse.

It does nothing until a test has the mark ``mesh``, or ``--meshrun`` is given. pytest imports it in
every project of the environment, so until then it imports no other package: a project's own modules
may have the name of one.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from meshrun.errors import MeshrunError, UsageError
from meshrun.host import rank_variables as var

if TYPE_CHECKING:
    from meshrun.api.tests_on_ranks import PytestRanks, RankTest
    from meshrun.layout import Layout

_MARK = (
    "mesh(spec, *, timeout=None, names=None, device=None, preload=(), env=None, cwd=None,"
    " options=())"
)
_MOST_GROUPS = 3
"""How many meshes keep their ranks at the same time; the least recently used one is closed."""
_TIMEOUT_S = 300.0
_SHORTEST_S = 0.001
_PHASE_HOOKS = [f"pytest_runtest_{when}" for when in ("setup", "call", "teardown")]
_MAKE_REPORT = "pytest_runtest_makereport"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--meshrun`` and ``meshrun_timeout``."""
    group = parser.getgroup("meshrun", "tests on the ranks of a mesh")
    group.addoption(
        "--meshrun",
        metavar="SPEC",
        help="mesh for tests that use the fixture `mesh`, `rank` or `layout` and have no mark",
    )
    parser.addini(
        "meshrun_timeout", f"seconds that a test on ranks may take [{_TIMEOUT_S:g}]", default=""
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark ``mesh``, and the plug-in that runs tests on ranks."""
    config.addinivalue_line("markers", f"{_MARK}: run the test on every rank of this mesh.")
    if not hasattr(config, "workerinput") or var.RANK not in os.environ:
        config.pluginmanager.register(_MeshTests(config), "meshrun-tests")


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Any:
    """The DeviceMesh of the ranks that run this test."""
    _check_on_ranks(request)
    from meshrun.mesh.current import current_mesh

    return current_mesh()


@pytest.fixture
def layout(request: pytest.FixtureRequest) -> Layout:
    """The layout of the ranks that run this test."""
    _check_on_ranks(request)
    from meshrun.mesh.current_layout import current_layout

    return current_layout()


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> int:
    """The rank of this process."""
    _check_on_ranks(request)
    return var.own_rank()


def _check_on_ranks(request: pytest.FixtureRequest) -> None:
    from meshrun.worker.serve_tests import NAME

    if not request.config.pluginmanager.has_plugin(NAME):
        pytest.fail(
            f"error: the fixture `{request.fixturename}` needs ranks, and this test has none\n"
            'hint: mark the test with @pytest.mark.mesh("dp=2"), or run pytest --meshrun dp=2',
            pytrace=False,
        )


# ---- the ranks of a test -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Request:
    """The ranks that a test needs, and how long it may take."""

    spec: Any
    options: tuple[tuple[str, Any], ...]
    timeout_s: float

    @property
    def key(self) -> str:
        """Tests with the same key share their ranks."""
        return repr((self.spec, self.options))


def _request_of(item: pytest.Item) -> _Request | None:
    """Return the ranks that a test needs, or ``None`` for an ordinary test.

    Raises:
        UsageError: If its time limit is invalid.
    """
    marker = item.get_closest_marker("mesh")
    options = dict(marker.kwargs) if marker else {}
    spec: Any = options.pop("spec", None)
    if marker is not None and marker.args:
        spec = marker.args[0]
    params = item.callspec.params if hasattr(item, "callspec") else {}
    uses_ours = [name for name in ("mesh", "layout", "rank") if _is_ours(item, name)]
    if "mesh" in uses_ours and "mesh" in params:
        spec = params["mesh"]
    if spec is None and (uses_ours or marker is not None):
        spec = item.config.getoption("meshrun")
    if spec is None:  # a mark without a mesh may be another package's
        return None
    from meshrun.plan.parse import parse_seconds

    timeout = options.pop("timeout", None)
    what = "@pytest.mark.mesh(timeout=...)" if timeout is not None else "meshrun_timeout"
    if timeout is None:
        timeout = item.config.getini("meshrun_timeout") or _TIMEOUT_S
    timeout_s = parse_seconds(str(timeout), what, least=_SHORTEST_S)
    return _Request(spec, tuple(sorted(options.items())), timeout_s)


def _needs_ranks(item: pytest.Item) -> bool:
    """Return whether a test runs on ranks: it needs some, and is not skipped by a mark."""
    from _pytest.skipping import evaluate_skip_marks

    try:
        return _request_of(item) is not None and evaluate_skip_marks(item) is None
    except MeshrunError:  # reported when the test is set up
        return True
    except pytest.fail.Exception:  # in the condition of a mark; pytest reports it
        return False


def _key_of(item: pytest.Item) -> str | None:
    """Return the key of the ranks that a test needs, if it needs any."""
    try:
        request = _request_of(item)
    except MeshrunError:  # reported when the test is set up
        return None
    return None if request is None else request.key


def _is_ours(item: pytest.Item, name: str) -> bool:
    """Return whether a test uses a fixture of this name that is defined here."""
    info = getattr(item, "_fixtureinfo", None)
    found: Sequence[Any] = info.name2fixturedefs.get(name, ()) if info is not None else ()
    return bool(found) and found[-1].func.__module__ == __name__


class _MeshTests:
    """The ranks of this session, and the tests that run on them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._ranks: OrderedDict[str, PytestRanks] = OrderedDict()
        self._test: RankTest | None = None
        self._is_quit = False
        """Whether the user has quit a debugger."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        """Run a test on its ranks, once or as often as other plug-ins repeat it."""
        if item.config.getoption("setupplan", False) or not _needs_ranks(item):
            return None
        from meshrun.api.tests_on_ranks import Hooks, RankTest
        from meshrun.worker.serve_tests import RETRIES, plugins_that_run_tests

        plug_ins = self._config.pluginmanager
        runner, forks = (plug_ins.get_plugin(name) for name in ("runner", "pytest_forked"))
        run_by = {*plugins_that_run_tests(item)} - {self, forks}  # ranks are processes anyway
        run_test = self._hook("pytest_runtest_protocol", run_by)
        seen_by = {self, *run_by, plug_ins.get_plugin(RETRIES)}
        by_name = {name: self._hook(name, seen_by - {runner}) for name in _PHASE_HOOKS}
        by_name[_MAKE_REPORT] = self._hook(_MAKE_REPORT, seen_by)
        self._test = RankTest(item, partial(self._run, item, nextitem))
        kind = type(item)
        hooks = Hooks(item.ihook, by_name)
        item.__class__ = type(kind.__name__, (kind,), {"ihook": hooks})
        try:
            run_test(item=item, nextitem=nextitem)
        finally:
            item.__class__ = kind
            self._test = None
        if self._is_quit:
            pytest.exit("Quitting debugger")
        return True

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_setup(self) -> None:
        """Run all phases on the ranks, and replay the first."""
        if self._test is not None:
            self._test.run()
            self._test.replay("setup")

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_call(self) -> None:
        """Replay the outcome of this phase on the ranks."""
        if self._test is not None:
            self._test.replay("call")

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        """Replay the outcome of this phase on the ranks."""
        if self._test is not None:
            self._test.replay("teardown")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> pytest.TestReport | None:
        """Return the merged report of the ranks."""
        return self._test.report(call) if self._test is not None else None

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item) -> bool | None:
        """Leave the limits of pytest-timeout to the ranks, which report when they begin."""
        return _needs_ranks(item) or None

    def _hook(self, name: str, plug_ins: Collection[object]) -> Any:
        """Return a caller of a hook that calls only these plug-ins."""
        manager = self._config.pluginmanager
        others = [each for each in manager.get_plugins() if each not in plug_ins]
        return manager.subset_hook_caller(name, others)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """End all ranks."""
        while self._ranks:
            self._ranks.popitem()[1].group.end()

    def _next_on_ranks(
        self, item: pytest.Item, nextitem: pytest.Item | None, key: str
    ) -> pytest.Item | None:
        """Return the next test on the same ranks, for which they keep fixtures."""
        if nextitem is None:
            return None
        items, after = item.session.items, [nextitem]
        if not hasattr(self._config, "workerinput"):  # pytest-xdist's workers run only some items
            after = items[items.index(item) + 1 :]
        return next((each for each in after if _key_of(each) == key), None)

    def _run(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
        from meshrun.api.tests_on_ranks import make_report
        from meshrun.report.result_text import render_error

        try:
            request = _request_of(item)
            assert request is not None  # noqa: S101 - otherwise this is not called
            ranks = self._ranks_for(item, request)
            following = self._next_on_ranks(item, nextitem, request.key)
            reports = ranks.run(item, following, request.timeout_s)
        except MeshrunError as error:
            return [make_report(item, "setup", render_error(error))]
        self._is_quit = ranks.is_quit
        if not ranks.group.is_open or ranks.is_spent or any(report.failed for report in reports):
            self._ranks.pop(request.key).group.end()
        return reports

    def _ranks_for(self, item: pytest.Item, request: _Request) -> PytestRanks:
        from meshrun.api.tests_on_ranks import PytestRanks

        if request.key not in self._ranks:
            while len(self._ranks) >= _MOST_GROUPS:
                self._ranks.popitem(last=False)[1].group.end()
            try:
                ranks = PytestRanks(self._config, request.spec, dict(request.options))
            except TypeError as error:
                what = str(error).rpartition("() ")[2]
                raise UsageError(f"@pytest.mark.mesh {what}", hint=f"it takes {_MARK}") from error
            except OSError as error:
                raise UsageError(f"@pytest.mark.mesh: {error}") from error
            paths = {str(each.path): None for each in item.session.items if _key_of(each)}
            ranks.begin(list(paths))
            self._ranks[request.key] = ranks
        self._ranks.move_to_end(request.key)
        return self._ranks[request.key]
