"""Threads of numeric libraries: one during imports, the rank's share after the fork."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

from meshrun.host import rank_variables as var
from meshrun.host.cores import count_usable_cores

_COUNT = re.compile(r"0*[1-9][0-9]{0,5}")
_have = {"torch": 1, "blas": 1}
"""How many threads they have: 1 when imported, later what was set here."""
_SET_BY_THREADPOOLCTL = "KMP_DUPLICATE_LIB_OK"


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
