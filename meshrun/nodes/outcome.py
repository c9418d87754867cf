"""What came of a generation of ranks on one node, as plain values that travel. Pure.

See :func:`meshrun.supervise.outcome_json.outcome_to_json` for what is in it.
"""

from __future__ import annotations

import copy
from typing import Any


def shift_times(outcome: dict[str, Any], by_ns: int) -> None:
    """Turn the times of another node's clock into ours, in place."""
    _shift(outcome.get("ranks"), by_ns)


def shift_cause(cause: dict[str, Any], by_ns: int) -> dict[str, Any]:
    """Return the cause of a restart with its times in another clock."""
    shifted = copy.deepcopy(cause)
    _shift(shifted, by_ns)
    return shifted


def _shift(value: Any, by_ns: int) -> None:
    if isinstance(value, dict):
        for name, each in value.items():
            if name.endswith("_ns") and isinstance(each, int):
                value[name] = each + by_ns
            else:
                _shift(each, by_ns)
