"""Makes torch's rendezvous handler, or a plug-in's, safe from others' pickles, and fast.

Anyone can write to torch's store, and a pickle can call any function. Also, torch's handler checks
for other nodes only once a second; a few nodes can check more often without more load on the store
than many nodes would cause.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import time
from typing import Any

from meshrun.plan.rendezvous_config import format_endpoint
from meshrun.protocol.zygote_messages import Negotiate

_CHECKS_PER_S = 64
"""By all nodes together."""
_LEAST_S = 0.05
_TORCHS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_KNOWN = {
    (_TORCHS, "_RendezvousState"),
    (_TORCHS, "_NodeDesc"),
    ("datetime", "datetime"),
    ("datetime", "timedelta"),
    ("datetime", "timezone"),
}


def make_handler(order: Negotiate) -> Any:
    """Return torch's handler, or a plug-in's."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters, dynamic_rendezvous
    from torch.distributed.elastic.rendezvous.registry import (
        _register_default_handlers,
        _register_out_of_tree_handlers,
        get_rendezvous_handler,
    )

    dynamic_rendezvous.pickle = PickleFilter
    with contextlib.suppress(Exception):
        _register_default_handlers()
        _register_out_of_tree_handlers()
    handler = get_rendezvous_handler(
        RendezvousParameters(
            backend=order.backend,
            endpoint=format_endpoint(order.endpoint_host, order.endpoint_port),
            run_id=order.run_id,
            min_nodes=order.least_nodes,
            max_nodes=order.nnodes,
            local_addr=order.address,
            **order.conf,
        )
    )
    _quicken(handler, order.nnodes)
    return handler


class PickleFilter:
    """Replaces the module ``pickle`` in torch's rendezvous."""

    PickleError = pickle.PickleError
    dumps = staticmethod(pickle.dumps)

    @staticmethod
    def loads(data: bytes) -> Any:
        """Return the state of a rendezvous.

        Raises:
            pickle.UnpicklingError: If it is not one, or contains anything else.
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


def _quicken(handler: Any, nnodes: int) -> None:
    """Have torch's handler check for other nodes as often as their number allows.

    torch 2.13 has no option for it: ``_DistributedRendezvousOpExecutor.run`` sleeps for a second
    between two checks, and caches the state for another second. Other handlers stay as they are.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    period_s = min(1.0, max(_LEAST_S, nnodes / _CHECKS_PER_S))
    holder: Any = getattr(handler, "_state_holder", None)
    if not hasattr(holder, "_cache_duration") or not hasattr(dynamic_rendezvous, "_delay"):
        return

    def delay(seconds: float | tuple[float, float]) -> None:
        longest_s = seconds if isinstance(seconds, int | float) else random.uniform(*seconds)  # noqa: S311
        time.sleep(min(longest_s, period_s))

    holder._cache_duration = 0
    dynamic_rendezvous._delay = delay
