"""Runs a case: starts the launch, waits for the moment, strikes, and waits for the end."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.chaos.drawing import MESHES, Case
from tests.chaos.expecting import Expected
from tests.kit import FAKES, PROGRAMS, Running, command, run_meshrun, wait_until

_LONG_S = 600
_ENOUGH_S = 3
"""Shutdown timeout for what ranks leave behind, long enough to strike while it is cleared."""
_SHORT_S = 0.3


class Controller:
    """Runs one case in its own folder."""

    def __init__(self, case: Case, expected: Expected, folder: Path) -> None:
        self.case, self.expected, self.folder = case, expected, folder
        self.logs = folder / "logs"
        self.logs.mkdir()
        self._master = self._reader = -1
        self._server_pid: int | None = None

    def run(self) -> tuple[int, Running]:
        """Run the case; return the exit code and the ended launch."""
        with self._server(), self._start() as running:
            running.server = self._server_pid
            self._wait_for_phase(running)
            self._strike(running)
            if self.expected.restarts:
                self._wait_for(running, lambda: "restart 1 of 1" in running.stderr)
            if self.expected.is_done:
                (self.folder / "go").touch()
            return running.wait(), running

    @contextmanager
    def _server(self) -> Iterator[None]:
        """Provide a warm server, if the case uses one."""
        if not self.case.is_warm:
            yield
            return
        (self.folder / "session").mkdir(mode=0o700)
        (installed := self.folder / "site-packages").mkdir()
        (installed / "torch").symlink_to(FAKES / "torch")
        (trivial := self.folder / "trivial.py").touch()
        (go := self.folder / "go").touch()
        left = run_meshrun("--warm", trivial, env=self._environment())
        go.unlink()
        for place in self.folder.glob("at.*"):
            place.unlink()
        assert left.returncode == 0, left.stderr
        path = self.folder / "session" / "meshrun"
        wait_until(lambda: any(path.glob("*.json")), lambda: "a warm server")
        self._server_pid = int(next(path.glob("*.json")).stem)
        try:
            yield
        finally:
            stopped = run_meshrun("--warm-stop", env=self._environment())
            assert stopped.stdout == "stopped 1 warm server\n", stopped

    # ---- start -----------------------------------------------------------------------------

    @contextmanager
    def _start(self) -> Iterator[Running]:
        case = self.case
        streams = {"stdout": -1, "stderr": -1}
        with ExitStack() as stack:
            for name in streams:
                file = stack.enter_context(open(self.folder / name, "wb"))
                streams[name] = file.fileno()
            ours: list[int] = []
            stdin = None
            if case.fault in ("hang_up", "ctrl_c"):
                self._master, stdin = os.openpty()
                ours.append(stdin)
            if case.on_terminal and stdin is not None:
                streams = dict.fromkeys(streams, stdin)
            if case.fault == "reader":
                self._reader, streams["stdout"] = os.pipe()
                ours.append(streams["stdout"])
            process = subprocess.Popen(
                self._command(),
                env={**os.environ, **self._environment()},
                stdin=stdin,
                **streams,
                start_new_session=True,
                preexec_fn=_take_terminal if stdin is not None else None,  # noqa: PLW1509
            )
            for fd in ours:
                os.close(fd)
        try:
            yield Running(process, self.folder)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            for fd in (self._master, self._reader):
                if fd >= 0:
                    os.close(fd)

    def _command(self) -> list[str]:
        case = self.case
        patient = case.fault == "ctrl_c" and case.times > 1 and case.failing_rank is None
        timeout_s = _LONG_S if patient else _ENOUGH_S if case.phase == "clearing" else _SHORT_S
        words = ["--shutdown-timeout", str(timeout_s)]
        words += ["--start-method", case.method, "--report", str(self.folder / "report.json")]
        words += ["--max-restarts", str(case.restarts)]
        if case.has_mesh:
            words += ["--mesh", MESHES[case.ranks], "--device", "cpu"]
            words += [] if case.real_torch else ["--mesh-init", "lazy"]
        else:
            words += ["--nproc-per-node", str(case.ranks)]
        if case.output != "console":
            words += [f"--{case.output}" + ("s" if case.output == "redirect" else ""), "3"]
            words += ["--log-dir", str(self.logs)]
        words += [str(PROGRAMS / "chaos.py"), str(self.folder), case.place, str(case.generation)]
        return [*self._wrapper(), *command(*words, *self._words())]

    def _words(self) -> Iterator[str]:
        case = self.case
        for word in ("deaf", "children", "watch"):
            if getattr(case, word):
                yield word
        if case.fault == "disk":
            yield "fill"
        if case.failing_rank is not None:
            yield f"fails={case.failing_rank}"
        if case.phase == "clearing":
            yield "leaves"

    def _wrapper(self) -> list[str]:
        """Return the command prefix that gives the launch a small disk or few descriptors."""
        case = self.case
        if case.fault == "descriptors":
            return ["sh", "-c", f'ulimit -n {case.room}; exec "$@"', "sh"]
        if case.fault not in ("disk", "inodes"):
            return []
        limit = f"size={case.room}" if case.fault == "disk" else f"nr_inodes={case.room}"
        mount = f"mount -t tmpfs -o {limit} none {self.logs}"
        inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
        if subprocess.run([*inside, mount], capture_output=True, check=False).returncode != 0:
            pytest.skip("a test may not mount a small disk here")
        return [*inside, f'{mount}; exec "$@"', "sh"]

    def _environment(self) -> dict[str, str]:
        case = self.case
        if case.real_torch:
            return {}
        warm = {"MESHRUN_WARM": "1", "XDG_RUNTIME_DIR": str(self.folder / "session")}
        return {
            **(warm if case.is_warm else {}),
            "PYTHONPATH": str(self.folder / "site-packages" if case.is_warm else FAKES),
            "OMP_NUM_THREADS": "2",  # makes ranks set their threads, where they can be held
            "FAKE_TORCH_HOLDS_IN": str(self.folder),
            "FAKE_TORCH_HOLDS_AT": f"{case.place} {case.generation}",
        }

    # ---- the moment ------------------------------------------------------------------------

    def _wait_for_phase(self, running: Running) -> None:
        case = self.case
        if case.phase == "all":
            return
        if case.phase == "clearing":
            self._wait_for(running, lambda: "restart 1 of 1" in running.stderr)
            return
        who: Sequence[object] = ["zygote"] if case.phase == "importing" else range(case.ranks)
        places = [self._place("at", each) for each in who]
        self._wait_for(running, lambda: all(place.exists() for place in places))

    @staticmethod
    def _wait_for(running: Running, condition: Callable[[], bool]) -> None:
        """Wait for a condition or the end of the launch."""
        wait_until(
            lambda: condition() or running.process.poll() is not None,
            lambda: f"no moment to strike:\n{running.stdout}\n---\n{running.stderr}",
        )

    def _place(self, what: str, who: object) -> Path:
        return self.folder / f"{what}.{self.case.generation}.{who}"

    def _strike(self, running: Running) -> None:
        match self.case.fault:
            case "signal":
                self._send(running)
            case "ctrl_c":
                for _ in range(self.case.times):
                    os.write(self._master, b"\x03")
                    wait_until(
                        lambda: (
                            "SIGINT: stopping" in running.stderr
                            or running.process.poll() is not None
                        ),
                        lambda: running.stderr,
                    )
            case "hang_up":
                os.close(self._master)
                self._master = -1
            case "reader":
                os.close(self._reader)
                self._reader = -1

    def _send(self, running: Running) -> None:
        case, launcher = self.case, running.process.pid
        if case.victim == "both":
            os.kill(launcher, signal.SIGSTOP)  # so that it does not see the zygote die
            for victim in (running.zygote(), launcher):
                os.kill(victim, case.signum)
            return
        victim = self._victim(running)
        os.kill(victim, case.signum)
        if case.signum != signal.SIGSTOP:
            return
        if case.then == "stop":
            os.kill(launcher, signal.SIGTERM)
        if case.then == "kill":
            os.kill(launcher, signal.SIGKILL)
        if case.then == "continue" or (case.then == "stop" and victim == launcher):
            os.kill(victim, signal.SIGCONT)

    def _victim(self, running: Running) -> int:
        case = self.case
        match case.victim:
            case "launcher":
                return running.process.pid
            case "zygote":
                return running.zygote()
            case "store":
                return running.below_zygote()[0]
            case "rank":
                return int(self._place("at", case.victim_rank).read_text())
            case _:
                return int(self._place(case.victim, case.victim_rank).read_text())


def _take_terminal() -> None:
    """Make standard input the session's controlling terminal, as a login does."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
