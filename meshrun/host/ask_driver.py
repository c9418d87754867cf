"""Questions to NVIDIA's driver, in a process of its own: its calls may never return."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from meshrun.errors import HostError
from meshrun.host.forked_call import ForkedCall
from meshrun.host.nvml import Nvml, has_nvml, open_nvml
from meshrun.host.stderr import note as note_on_stderr

T = TypeVar("T")
_SLOW_S = 5.0
"""Longer than most drivers take to initialize GPUs that no process uses."""
_MOST_S = 120.0
_GLANCE_S = 1.0
"""How long a running launch waits; its ranks' output waits, too."""


class Driver:
    """Asks the driver questions, one at a time: while one has no answer, others get none.

    After a crash, it is not asked again. If it does not answer, ``note`` prints that.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._next_note_s = note, _SLOW_S
        self._asked: ForkedCall[Any] | None = None
        self._has_crashed = False
        self.trouble = ""
        """Why the last question got no answer; "" if it got one."""

    def ask(self, read: Callable[[Nvml | None], T], *, most_s: float = _GLANCE_S) -> T | None:
        """Return what ``read`` returns for NVML; ``None`` without an answer within ``most_s``."""
        if self._asked is not None:
            self._take(0.0)
        if self._asked is not None or self._has_crashed:
            return None
        if not has_nvml():
            return read(None)
        try:
            self._asked = ForkedCall(partial(_read, read))
        except OSError as error:
            self.trouble = f"cannot ask the NVIDIA driver: {error.strerror}"
            return None
        return self._take(most_s)  # type: ignore[no-any-return]

    def _take(self, most_s: float) -> Any:
        assert self._asked is not None  # noqa: S101 - the callers check this
        until_s = self._asked.age_s + most_s
        while not self._asked.wait(min(until_s, self._next_note_s) - self._asked.age_s):
            age_s = self._asked.age_s
            self.trouble = f"the NVIDIA driver has not answered for {age_s:.0f} s"
            if age_s >= self._next_note_s:
                self._next_note_s *= 2
                self._note(self.trouble)
            if age_s >= until_s:
                return None
        asked, self._asked = self._asked, None
        answer, self.trouble = asked.take(), ""
        if self._next_note_s > _SLOW_S:
            self._note(f"the NVIDIA driver answered after {asked.age_s:.0f} s")
            self._next_note_s = _SLOW_S
        if asked.killed_by is not None:
            self._has_crashed = True
            self.trouble = f"the NVIDIA driver's library crashed with signal {asked.killed_by}"
        return answer

    def close(self) -> None:
        """Stop waiting for an answer."""
        if self._asked is not None:
            self._asked.close()
            self._asked = None


def ask_driver(read: Callable[[Nvml | None], T]) -> T:
    """Return what ``read`` returns for NVML, with notes on stderr while there is no answer.

    Raises:
        HostError: If there is none.
    """
    driver = Driver(note_on_stderr)
    answer = driver.ask(read, most_s=_MOST_S)
    driver.close()
    if driver.trouble:
        raise HostError(
            driver.trouble,
            hint="see `nvidia-smi` and the kernel log; --mesh with --device cpu needs no driver",
        )
    return answer  # type: ignore[return-value]


def _read(read: Callable[[Nvml | None], T]) -> T:
    with open_nvml() as nvml:
        return read(nvml)
