"""exclude_node(reason): a program reports that its node must not be used."""

from __future__ import annotations

from collections.abc import Callable


class _Exclusion:
    """Where it is reported; a global, as every thread and library has the same launcher."""

    def __init__(self) -> None:
        self.tell: Callable[[str], None] | None = None


exclusion = _Exclusion()


def exclude_node(reason: str) -> None:
    """Tell the launcher that this rank's node must not be used, for example as its GPU is broken.

    An elastic launch continues without the node if enough are left. Any other launch ends with exit
    code 78 and is not restarted; the report says how to leave the node out next time. Does nothing
    outside meshrun.

    Args:
        reason: For people, and for ``--node-history``.
    """
    if exclusion.tell is not None:
        exclusion.tell(str(reason))
