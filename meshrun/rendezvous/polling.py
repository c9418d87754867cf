"""How often torch's rendezvous checks for other nodes: by default once a second.

A few nodes may look more often without more load on the store than many would be.
"""

from __future__ import annotations

import random
import time
from typing import Any

_LOOKS_A_SECOND = 64
"""By all nodes together."""
_LEAST_S = 0.05


def quicken(handler: Any, nnodes: int) -> None:
    """Have a handler of torch look as often as so few nodes may.

    torch 2.13 has no option for it: ``_DistributedRendezvousOpExecutor.run`` sleeps for a second
    between two looks, and what was read is read again only after another. A handler that has none
    of this is left as it is.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    period_s = min(1.0, max(_LEAST_S, nnodes / _LOOKS_A_SECOND))
    holder: Any = getattr(handler, "_state_holder", None)
    if not hasattr(holder, "_cache_duration") or not hasattr(dynamic_rendezvous, "_delay"):
        return

    def delay(seconds: float | tuple[float, float]) -> None:
        longest_s = seconds if isinstance(seconds, int | float) else random.uniform(*seconds)  # noqa: S311
        time.sleep(min(longest_s, period_s))

    holder._cache_duration = 0
    dynamic_rendezvous._delay = delay
