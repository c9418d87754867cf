"""Restricts the pickles that torch's rendezvous reads from its store to its own types.

A pickle can call any function, and others can write to torch's store.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

_TORCHS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_KNOWN = {
    (_TORCHS, "_RendezvousState"),
    (_TORCHS, "_NodeDesc"),
    ("datetime", "datetime"),
    ("datetime", "timedelta"),
    ("datetime", "timezone"),
}


class PickleFilter:
    """Stands for the module ``pickle`` where torch's rendezvous looks it up."""

    PickleError = pickle.PickleError
    dumps = staticmethod(pickle.dumps)

    @staticmethod
    def loads(data: bytes) -> Any:
        """Return the state of a rendezvous.

        Raises:
            pickle.UnpicklingError: If it is none, or has anything else in it.
        """
        try:
            state = _Reader(io.BytesIO(data)).load()
        except Exception as error:
            raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error
        if type(state).__name__ != "_RendezvousState":
            raise pickle.UnpicklingError(f"a {type(state).__name__} is not a rendezvous state")
        return state


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"{module}.{name} is not a rendezvous type")
        return super().find_class(module, name)


def read_own_types_only() -> None:
    """Have torch's rendezvous in this process read nothing else."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.pickle = PickleFilter
