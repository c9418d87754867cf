"""The pytest plug-in: runs tests that have a mesh on ranks, which the next tests reuse.

It does nothing until a test has the mark ``mesh``, or ``--meshrun`` is given.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from meshrun.errors import MeshrunError, UsageError

if TYPE_CHECKING:
    from meshrun.api.answers import Exchange, Member
    from meshrun.api.worker_group import WorkerGroup
    from meshrun.layout import Layout
    from meshrun.worker.serve_tests import TestDone

_MARK = (
    "mesh(spec, *, timeout=None, names=None, device=None, preload=(), env=None, cwd=None,"
    " options=())"
)
_MOST_GROUPS = 3
"""How many meshes keep their ranks at the same time; the least recently used one is closed."""
_TIMEOUT_S = 300.0
_SHORTEST_S = 0.001
_PHASES = ("setup", "call", "teardown")
_UNFINISHED = "did not finish"
_PHASE_HOOKS = [f"pytest_runtest_{when}" for when in _PHASES]
_MAKE_REPORT = "pytest_runtest_makereport"
_OWN_OPTIONS = {
    "usepdb": False, "trace": False, "maxfail": 0, "keyword": "", "markexpr": "", "deselect": None,
    "numprocesses": None, "maxprocesses": None, "dist": "no", "distload": False, "tx": [],
    "looponfail": False, "xmlpath": None, "collectonly": False, "lf": False, "failedfirst": False,
    "newfirst": False, "stepwise": False, "stepwise_skip": False, "stepwise_reset": False,
    "ignore": None, "ignore_glob": None, "cacheclear": False, "cacheshow": None,
    "no_cov": True, "setupshow": False, "setuponly": False, "setupplan": False, "log_file": None,
}  # fmt: skip
"""Options that the session handles itself, with the values that ranks get."""
_SEED = "hypothesis_seed"
"""The option of hypothesis, if it is installed: ``None`` draws other examples in each process."""


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
    if not hasattr(config, "workerinput") or "RANK" not in os.environ:
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
    return int(os.environ["RANK"])


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
    from meshrun.plan.parse import parse_seconds

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


def _render(error: MeshrunError) -> str:
    from meshrun.report.message import render_error

    return render_error(error)


def _is_ours(item: pytest.Item, name: str) -> bool:
    """Return whether a test uses a fixture of this name that is defined here."""
    info = getattr(item, "_fixtureinfo", None)
    found: Sequence[Any] = info.name2fixturedefs.get(name, ()) if info is not None else ()
    return bool(found) and found[-1].func.__module__ == __name__


class _MeshTests:
    """The ranks of this session, and the tests that run on them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._ranks: OrderedDict[str, _TestRanks] = OrderedDict()
        self._test: _TestOnRanks | None = None
        self._is_quit = False
        """Whether the user has quit a debugger."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        """Run a test on its ranks, once or as often as other plug-ins repeat it."""
        from meshrun.worker.serve_tests import RETRIES, plugins_that_run_tests

        if item.config.getoption("setupplan", False) or not _needs_ranks(item):
            return None
        plug_ins = self._config.pluginmanager
        runner, forks = (plug_ins.get_plugin(name) for name in ("runner", "pytest_forked"))
        run_by = {*plugins_that_run_tests(item)} - {self, forks}  # ranks are processes anyway
        run_test = self._hook("pytest_runtest_protocol", run_by)
        seen_by = {self, *run_by, plug_ins.get_plugin(RETRIES)}
        by_name = {name: self._hook(name, seen_by - {runner}) for name in _PHASE_HOOKS}
        by_name[_MAKE_REPORT] = self._hook(_MAKE_REPORT, seen_by)
        self._test = _TestOnRanks(item, partial(self._run, item, nextitem))
        kind = type(item)
        hooks = _Hooks(item.ihook, by_name)
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
            self._ranks.popitem()[1].group.close()

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
        try:
            request = _request_of(item)
            assert request is not None  # noqa: S101 - otherwise this is not called
            ranks = self._ranks_for(item, request)
            following = self._next_on_ranks(item, nextitem, request.key)
            reports = ranks.run(item, following, request.timeout_s)
        except MeshrunError as error:
            return [_report(item, "setup", _render(error))]
        self._is_quit = ranks.is_quit
        if not ranks.group.is_open or ranks.is_spent or any(report.failed for report in reports):
            self._ranks.pop(request.key).group.close()
        return reports

    def _ranks_for(self, item: pytest.Item, request: _Request) -> _TestRanks:
        if request.key not in self._ranks:
            while len(self._ranks) >= _MOST_GROUPS:
                self._ranks.popitem(last=False)[1].group.close()
            paths = {str(each.path): None for each in item.session.items if _key_of(each)}
            self._ranks[request.key] = _TestRanks(self._config, request, list(paths))
        self._ranks.move_to_end(request.key)
        return self._ranks[request.key]


class _TestOnRanks:
    """A test on ranks: runs all its phases when it is set up, and replays them to pytest."""

    def __init__(self, item: pytest.Item, run: Callable[[], list[pytest.TestReport]]) -> None:
        self._item, self._run = item, run
        self._reports: dict[str, list[pytest.TestReport]] = {when: [] for when in _PHASES}
        self._raised: BaseException | None = None

    def run(self) -> None:
        """Run the test, for the first time or again."""
        for when in _PHASES:
            self._reports[when] = []
        for report in self._run():
            self._reports[str(report.when)].append(report)

    def replay(self, when: str) -> None:
        """Report the subtests of a phase; raise an exception if the phase did not pass.

        A phase without reports has passed, or another one has failed.
        """
        *parts, own = self._reports[when] or [_report(self._item, when)]
        for part in parts:
            self._item.ihook.pytest_runtest_logreport(report=part)
        self._reports[when] = [own]
        if own.failed:
            self._raised = pytest.fail.Exception(own.longreprtext, pytrace=False)
        elif own.skipped:
            self._raised = pytest.skip.Exception(own.longreprtext)
        else:
            return
        raise self._raised

    def report(self, call: pytest.CallInfo[None]) -> pytest.TestReport | None:
        """Return the report of a phase; ``None`` if it failed in this process."""
        error = call.excinfo.value if call.excinfo is not None else None
        if isinstance(error, KeyboardInterrupt):
            raise error
        return self._reports[call.when][0] if error in (None, self._raised) else None


class _Hooks:
    """The hooks of a test on ranks, where most of those for its phases have been called already."""

    def __init__(self, hooks: Any, by_name: Mapping[str, Any]) -> None:
        self._hooks, self._by_name = hooks, by_name

    def __getattr__(self, name: str) -> Any:
        return self._by_name.get(name) or getattr(self._hooks, name)

    def pytest_exception_interact(self, **_: object) -> None:
        """Do nothing: the ranks have called this hook."""


class _TestRanks:
    """Ranks that run tests of this session."""

    def __init__(self, config: pytest.Config, request: _Request, paths: list[str]) -> None:
        from meshrun.api.worker_group import WorkerGroup
        from meshrun.worker.serve_tests import Begin

        self._config = config
        self._output = io.StringIO()
        # Output that pytest does not capture here is not captured on ranks either.
        is_live = config.getoption("capture") in ("no", "tee-sys")
        output = None if is_live else self._output
        try:
            self.group: WorkerGroup = WorkerGroup(
                mesh=request.spec,
                **dict(request.options),
                stdout=output,
                stderr=output,
                serve="meshrun.worker.serve_tests",
            )
        except TypeError as error:
            raise UsageError(f"@pytest.mark.mesh: {error}", hint=f"it takes {_MARK}") from error
        except OSError as error:
            raise UsageError(f"@pytest.mark.mesh: {error}") from error
        self.is_quit = False
        """Whether the user has quit a debugger."""
        self.is_spent = False
        """Whether the last test left the ranks unusable for others."""
        begin = Begin(
            _args_of(config),
            _options_of(config),
            _workerinput_of(config),
            config.getini("markers"),
            paths,
            config.getoption("usepdb"),
        )
        began = self.group.exchange(pickle.dumps(begin), timeout_s=_TIMEOUT_S)
        if began.missing:
            reason = began.trouble or began.reason
            text = f"the ranks' sessions did not start: {reason}\n{self._output.getvalue()}"
            raise UsageError(text.rstrip())

    def run(
        self, item: pytest.Item, nextitem: pytest.Item | None, timeout_s: float
    ) -> list[pytest.TestReport]:
        """Run a test; return a merged report for each of its phases.

        Raises:
            pytest.exit.Exception: If the test called ``pytest.exit()`` on a rank.
        """
        from meshrun.api.lent_terminal import Lender
        from meshrun.worker.serve_tests import RunTest

        self._output.seek(0)
        self._output.truncate()
        order = RunTest(item.nodeid, nextitem.nodeid if nextitem is not None else None)
        lender, began_s = Lender(self._debugging), time.monotonic()
        answers = self.group.exchange(
            pickle.dumps(order), timeout_s=timeout_s, failed=_has_failed, handle=lender.handle
        )
        self.is_quit = lender.has_quit
        self.is_spent = any(done.is_last for done in answers.by_member.values())
        self._report_warnings(answers.by_member.values())
        for member, done in answers.by_member.items():
            if done.exit is not None:
                raise done.exit
            if done.text:
                return [_report(item, "call", f"{member.label}: {done.text}")]
        merged = self._merged(answers)
        stray = self._output.getvalue()
        if answers.missing:
            took_s = time.monotonic() - began_s
            return [_unfinished(item, merged, answers, stray, took_s)]
        if stray:
            merged[-1].sections.append(("Output of ranks outside of tests", stray))
        return merged

    @contextlib.contextmanager
    def _debugging(self) -> Iterator[None]:
        """Leave the terminal to a debugger while the block runs."""
        from meshrun.worker.serve_tests import without_capture

        with without_capture(self._config):
            self._config.hook.pytest_enter_pdb(config=self._config, pdb=None)
            yield

    def _merged(self, answers: Exchange) -> list[pytest.TestReport]:
        """Return a merged report for each phase, and each subtest, that any rank has reported.

        If the setup did not pass on all ranks, the reports of the call are dropped.
        """
        by_part: dict[tuple[int, bool, str, int], dict[Member, pytest.TestReport]] = {}
        from_data = self._config.hook.pytest_report_from_serializable
        for member, done in answers.by_member.items():
            counts: Counter[str] = Counter()
            for data in done.reports:
                report = from_data(config=self._config, data=data)
                subtest = repr(getattr(report, "context", ""))
                is_phase = type(report) is pytest.TestReport
                part = (_PHASES.index(report.when), is_phase, subtest, counts[subtest])
                counts[subtest] += not is_phase
                by_part.setdefault(part, {})[member] = report
        world_size = len(answers.by_member) + len(answers.missing)
        parts = sorted(by_part, key=lambda part: part[:2])  # the subtests of a phase come first
        reports = [_merge(by_part[part], world_size, answers.missing) for part in parts]
        lacks_setup = any(
            report.failed or hasattr(report, "wasxfail")
            for report in reports
            if report.when == "setup"
        )
        return [each for each in reports if not (lacks_setup and each.when == "call")]

    def _report_warnings(self, done: Iterable[TestDone]) -> None:
        """Report each warning once, however many ranks gave it."""
        seen = set()
        for each in done:
            for message, when, nodeid, location in each.warnings:
                if (key := (str(message.message), nodeid, location)) not in seen:
                    seen.add(key)
                    self._config.hook.pytest_warning_recorded.call_historic(
                        kwargs={
                            "warning_message": message,
                            "when": when,
                            "nodeid": nodeid,
                            "location": location,
                        }
                    )


def _has_failed(done: TestDone) -> bool:
    has_reports = not done.text and done.exit is None
    return not has_reports or any(map(_is_failure, done.reports))


def _options_of(config: pytest.Config) -> dict[str, Any]:
    """Return the options for ranks: all that can be pickled, with ``_OWN_OPTIONS`` reset."""
    kept = {name: value for name, value in vars(config.option).items() if _can_be_pickled(value)}
    kept |= {name: value for name, value in _OWN_OPTIONS.items() if name in kept}
    if kept.get(_SEED, "") is None:  # ranks must draw the same examples
        kept[_SEED] = random.getrandbits(32)
    temporary = config._tmp_path_factory.mktemp("ranks", numbered=True)  # type: ignore[attr-defined]
    # Ranks may have another working folder.
    place = {"rootdir": str(config.rootpath), "basetemp": str(temporary)}
    return kept | place | ({"inifilename": str(config.inipath)} if config.inipath else {})


def _args_of(config: pytest.Config) -> list[str]:
    """Return the arguments of the session, independent of the working folder."""
    if config.getoption("pyargs"):
        return list(config.args)
    return [os.path.join(config.invocation_params.dir, each) for each in config.args]


def _workerinput_of(config: pytest.Config) -> dict[str, Any]:
    """Return what plug-ins pass to a worker of pytest-xdist, since they take a rank for one."""
    found = dict(getattr(config, "workerinput", {}))
    node = SimpleNamespace(config=config, workerinput=found)
    hook = getattr(config.hook, "pytest_configure_node", None)
    for each in hook.get_hookimpls() if hook is not None else ():
        with contextlib.suppress(Exception):  # this node lacks most attributes of a worker's
            each.function(node)
    return {name: value for name, value in found.items() if _can_be_pickled(value)}


def _can_be_pickled(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


# ---- merged reports ----------------------------------------------------------------------------


def _merge(
    found: Mapping[Member, pytest.TestReport], world_size: int, missing: Sequence[Member]
) -> pytest.TestReport:
    """Return the report of the rank with the worst outcome, the first of these in time."""
    first = min(
        found, key=lambda member: (_badness(found[member]), _ended(found[member]), member.rank)
    )
    report = found[first]
    sections = [*_sections(found, world_size)]
    if report.failed and world_size > 1:
        report.sections = [*sections, ("Ranks", "\n".join(_outcomes(found, first, missing)))]
    else:
        report.sections = sections
    report.duration = max(each.duration for each in found.values())
    return report


def _badness(report: pytest.TestReport) -> int:
    """Return how bad a report is, from 0; a test expected to fail may do so on any rank."""
    if _is_failure(vars(report)):
        return 0 if report.failed else 1
    if report.failed or hasattr(report, "wasxfail"):
        return 2
    return 3 if report.passed else 4


def _is_failure(report: Mapping[str, Any]) -> bool:
    """Return whether a test failed, as expected or not; passing a strict xfail does not count."""
    if report.get("outcome") == "failed":
        return not str(report.get("longrepr")).startswith("[XPASS(strict)]")
    return report.get("outcome") == "skipped" and "wasxfail" in report


def _ended(report: pytest.TestReport) -> float:
    return float(getattr(report, "stop", 0.0))


def _sections(
    found: Mapping[Member, pytest.TestReport], world_size: int
) -> Iterator[tuple[str, str]]:
    """Yield the output of ranks; ranks with equal output share a section."""
    texts: dict[tuple[str, str], list[str]] = {}
    for member in sorted(found, key=lambda member: member.rank):
        for name, text in found[member].sections:
            texts.setdefault((name, text), []).append(member.label)
    for (name, text), labels in texts.items():
        is_of_all = len(labels) == world_size > 1
        yield f"{name} [{f'all {world_size} ranks' if is_of_all else ', '.join(labels)}]", text


def _outcomes(
    found: Mapping[Member, pytest.TestReport], first: Member, missing: Sequence[Member]
) -> Iterator[str]:
    """Yield a line with the outcome of each rank."""
    for member in sorted([*found, *missing], key=lambda member: member.rank):
        if member not in found:
            yield f"{member.label}: {_UNFINISHED}"
            continue
        report = found[member]
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = f": {crash.message.splitlines()[0]}" if report.failed and crash is not None else ""
        shown = " (shown above)" if member is first else ""
        yield f"{member.label}: {report.outcome}{reason}{shown}"


def _all_outcomes(answers: Exchange) -> Iterator[str]:
    """Yield a line with the outcome of each rank, or how its process ended."""
    from meshrun.protocol.result import RankFailed
    from meshrun.report.failure import describe_end

    trouble = answers.trouble
    failures = trouble.result.failures if isinstance(trouble, RankFailed) else ()
    ended = {each.rank: describe_end(each) for each in failures if not each.asked_to_end}
    outcomes = {member: ended.get(member.rank, _UNFINISHED) for member in answers.missing}
    for member, done in answers.by_member.items():
        of_phases = [data.get("outcome") for data in done.reports]
        worst = (each for each in ("failed", "skipped", "passed") if each in of_phases)
        outcomes[member] = next(worst, "passed")
    for member in sorted(outcomes, key=lambda member: member.rank):
        yield f"{member.label}: {outcomes[member]}"


def _unfinished(
    item: pytest.Item,
    merged: Sequence[pytest.TestReport],
    answers: Exchange,
    output: str,
    took_s: float,
) -> pytest.TestReport:
    """Return the report of a test that some ranks did not finish.

    If another rank failed, its failure is reported as the cause.
    """
    from meshrun.api.answers import describe_missing
    from meshrun.protocol.result import RankFailed
    from meshrun.report.failure import render_failure

    text = "\n".join(describe_missing(answers))
    if isinstance(answers.trouble, RankFailed):
        text = render_failure(answers.trouble.result)
        text = text[max(0, text.find("error:")) :]
    elif answers.trouble is not None:
        text = f"error: {answers.trouble}"
    failed = next((report for report in merged if _is_failure(vars(report))), None)
    if failed is None or answers.is_rank_gone:  # other ranks' errors are about lost connections
        printed = [line for line in output.splitlines(keepends=True) if line.startswith("[")]
        sections = list(dict.fromkeys(each for report in merged for each in report.sections))
        sections += [("Output of ranks", "".join(printed))] if printed else []
        if len(answers.by_member) + len(answers.missing) > 1:
            sections.append(("Ranks", "\n".join(_all_outcomes(answers))))
        return _report(item, "call", text, sections=sections, took_s=took_s)
    failed.sections.append(("Ranks that did not finish", text))
    return failed


def _report(
    item: pytest.Item,
    when: Any,
    text: str = "",
    *,
    sections: Iterable[tuple[str, str]] = (),
    took_s: float = 0.0,
) -> pytest.TestReport:
    """Return the report of a phase that failed with a text, or passed."""
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome="failed" if text else "passed",
        longrepr=text or None,
        when=when,
        sections=sections,
        duration=took_s,
    )
