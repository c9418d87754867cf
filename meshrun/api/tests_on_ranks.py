"""Tests that run on ranks: the sessions of the ranks, their orders, and their merged reports."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from meshrun.api.exchange import Exchange, GroupRank, TerminalOwner, describe_missing
from meshrun.api.worker_group import WorkerGroup
from meshrun.errors import UsageError
from meshrun.protocol.result import RankFailed
from meshrun.report.result_text import describe_rank_end, render_failure
from meshrun.worker.serve_tests import BeginSession, RunTest, TestDone, is_failure, without_capture

_STARTS_IN_S = 300.0
"""How long the ranks' sessions may take to collect tests."""
_PHASES = ("setup", "call", "teardown")
_UNFINISHED = "did not finish"
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


class RankTest:
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
        *parts, own = self._reports[when] or [make_report(self._item, when)]
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


class Hooks:
    """The hooks of a test on ranks, where most of those for its phases have been called already."""

    def __init__(self, hooks: Any, by_name: Mapping[str, Any]) -> None:
        self._hooks, self._by_name = hooks, by_name

    def __getattr__(self, name: str) -> Any:
        return self._by_name.get(name) or getattr(self._hooks, name)

    def pytest_exception_interact(self, **_: object) -> None:
        """Do nothing: the ranks have called this hook."""


class PytestRanks:
    """Ranks that run tests of this session."""

    def __init__(self, config: pytest.Config, spec: Any, options: Mapping[str, Any]) -> None:
        self._config = config
        self._output = io.StringIO()
        # Output that pytest does not capture here is not captured on ranks either.
        is_live = config.getoption("capture") in ("no", "tee-sys")
        output = None if is_live else self._output
        self.group = WorkerGroup(
            mesh=spec,
            **options,
            stdout=output,
            stderr=output,
            serve="meshrun.worker.serve_tests",
        )
        self.is_quit = False
        """Whether the user has quit a debugger."""
        self.is_spent = False
        """Whether the last test left the ranks unusable for others."""

    def begin(self, paths: list[str]) -> None:
        """Begin a session on each rank, which collects the tests of some files.

        Raises:
            UsageError: If one does not begin.
        """
        config = self._config
        begin = BeginSession(
            _args_of(config),
            _options_of(config),
            _workerinput_of(config),
            config.getini("markers"),
            paths,
            config.getoption("usepdb"),
        )
        began = self.group.exchange(
            begin, timeout_s=_STARTS_IN_S, terminal=TerminalOwner(self._debugging)
        )
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
        self._output.seek(0)
        self._output.truncate()
        order = RunTest(item.nodeid, nextitem.nodeid if nextitem is not None else None)
        terminal, began_s = TerminalOwner(self._debugging), time.monotonic()
        answers = self.group.exchange(order, timeout_s=timeout_s, terminal=terminal)
        self.is_quit = terminal.has_quit
        self.is_spent = any(done.is_last for done in answers.by_member.values())
        self._report_warnings(answers.by_member.values())
        for member, done in answers.by_member.items():
            if done.exit is not None:
                raise done.exit
            if done.text:
                return [make_report(item, "call", f"{member.label}: {done.text}")]
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
        with without_capture(self._config):
            self._config.hook.pytest_enter_pdb(config=self._config, pdb=None)
            yield

    def _merged(self, answers: Exchange) -> list[pytest.TestReport]:
        """Return a merged report for each phase, and each subtest, that any rank has reported.

        If the setup did not pass on all ranks, the reports of the call are dropped.
        """
        by_part: dict[tuple[int, bool, str, int], dict[GroupRank, pytest.TestReport]] = {}
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
    found: Mapping[GroupRank, pytest.TestReport], world_size: int, missing: Sequence[GroupRank]
) -> pytest.TestReport:
    """Return the report of the rank with the worst outcome, the first of these in time."""
    first = min(
        found,
        key=lambda one: (_badness(found[one]), getattr(found[one], "stop", 0.0), one.rank),
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
    if is_failure(vars(report)):
        return 0 if report.failed else 1
    if report.failed or hasattr(report, "wasxfail"):
        return 2
    return 3 if report.passed else 4


def _sections(
    found: Mapping[GroupRank, pytest.TestReport], world_size: int
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
    found: Mapping[GroupRank, pytest.TestReport], first: GroupRank, missing: Sequence[GroupRank]
) -> Iterator[str]:
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
    trouble = answers.trouble
    failures = trouble.result.failures if isinstance(trouble, RankFailed) else ()
    ended = {each.rank: describe_rank_end(each) for each in failures if not each.asked_to_end}
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
    text = "\n".join(describe_missing(answers))
    if isinstance(answers.trouble, RankFailed):
        text = render_failure(answers.trouble.result)
        text = text[max(0, text.find("error:")) :]
    elif answers.trouble is not None:
        text = f"error: {answers.trouble}"
    failed = next((report for report in merged if is_failure(vars(report))), None)
    if failed is None or answers.is_rank_gone:  # other ranks' errors are about lost connections
        printed = [line for line in output.splitlines(keepends=True) if line.startswith("[")]
        sections = list(dict.fromkeys(each for report in merged for each in report.sections))
        sections += [("Output of ranks", "".join(printed))] if printed else []
        if len(answers.by_member) + len(answers.missing) > 1:
            sections.append(("Ranks", "\n".join(_all_outcomes(answers))))
        return make_report(item, "call", text, sections=sections, took_s=took_s)
    failed.sections.append(("Ranks that did not finish", text))
    return failed


def make_report(
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
