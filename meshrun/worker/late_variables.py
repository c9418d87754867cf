"""Variables that come after torch's import: numbers of threads are applied, others warned about."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from functools import wraps
from types import FrameType, FunctionType, ModuleType

from meshrun.host import rank_variables as var
from meshrun.host.cores import count_usable_cores
from meshrun.mesh.late_settings import note
from meshrun.worker.early_settings import THREAD_COUNTS, EarlySettings, is_read_at_import

_OURS = (__file__, os.__file__)
_IN_TIME = (
    "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
    "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK",
)  # fmt: skip
"""Variables that torch reads whenever it needs them, or that other copies of OpenMP read.

Lightning, joblib and scikit-learn set some of them when they are imported. A warm server still
compares them, as libraries may read them at import.
"""
_COUNT = re.compile(r"0*[1-9][0-9]{0,5}")
_have = {"torch": 1, "blas": 1}
"""How many threads they have: 1 when imported, later what was set here."""
_SET_BY_THREADPOOLCTL = "KMP_DUPLICATE_LIB_OK"


def follow_environment(settings: EarlySettings) -> None:
    """Follow what the program sets before it imports torch, and warn about what comes too late.

    ``os.environ`` calls ``os.putenv`` and ``os.unsetenv`` for each change.

    Args:
        settings: Settings that were in effect while torch was imported, but are not set yet.
    """
    had: dict[str, str | None] = {**os.environ, **settings.values}
    putenv, unsetenv = os.putenv, os.unsetenv

    def on_change(name: str, value: str | None) -> None:
        if name in THREAD_COUNTS and not _has_torch(sys._getframe(2)):
            raise_thread_counts({**os.environ, name: value or ""})
        elif is_read_at_import(name) and name not in _IN_TIME and had.get(name) != value:
            had[name] = value
            if os.environ.get(var.RANK) == "0" and not _has_torch(sys._getframe(2)):
                note(
                    f"{name} was set after torch had been imported for all ranks, so it has no"
                    " effect; set it before the launch, or use --start-method exec"
                )

    @wraps(putenv)
    def put(name: str | bytes, value: str | bytes) -> None:
        putenv(name, value)
        on_change(os.fsdecode(name), os.fsdecode(value))

    @wraps(unsetenv)
    def unset(name: str | bytes) -> None:
        unsetenv(name)
        on_change(os.fsdecode(name), None)

    os.putenv, os.unsetenv = put, unset  # type: ignore[assignment]


def _has_torch(frame: FrameType | None) -> bool:
    """Return whether the calling code has torch already, so that it cannot expect an effect."""
    while frame is not None:
        if frame.f_code.co_filename not in _OURS:
            names = {**frame.f_globals, **frame.f_locals}
            if any(_is_from_torch(value) for value in names.values()):
                return True
        frame = frame.f_back
    return False


def _is_from_torch(value: object) -> bool:
    if isinstance(value, ModuleType):
        name: object = value.__name__
    elif isinstance(value, type | FunctionType):
        name = value.__module__
    else:
        return False
    return isinstance(name, str) and name.partition(".")[0] == "torch"


def raise_thread_counts(env: Mapping[str, str]) -> None:
    """Give torch and numpy's BLAS as many threads as ``env`` says, or this rank's share of cores.

    Both read the variables once, while they are imported, and were imported with 1.
    """
    workers = _positive(env.get(var.LOCAL_WORLD_SIZE, "")) or 1
    share = max(1, count_usable_cores() // workers)
    threads = _positive(env.get(var.OMP_NUM_THREADS, "")) or share
    torch = sys.modules.get("torch")
    if torch is not None and threads != _have["torch"]:
        torch.set_num_threads(threads)
        _have["torch"] = threads
    blas = _positive(env.get("OPENBLAS_NUM_THREADS", "")) or threads
    if "numpy" in sys.modules and blas != _have["blas"]:
        _have["blas"] = blas
        had = os.environ.get(_SET_BY_THREADPOOLCTL)
        try:
            from threadpoolctl import threadpool_limits
        except ImportError:  # run from a checkout: BLAS keeps its one thread
            return
        if had is None:  # keep the program's environment unchanged
            os.environ.pop(_SET_BY_THREADPOOLCTL, None)
        threadpool_limits(limits=blas, user_api="blas")


def _positive(text: str) -> int | None:
    """Return the first number of ``4`` or ``4,2`` (nested levels); ``None`` if there is none."""
    head = text.partition(",")[0].strip()
    return int(head) if _COUNT.fullmatch(head) else None
