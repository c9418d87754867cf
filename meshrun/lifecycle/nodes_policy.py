"""What differs between a launch with a fixed number of nodes and an elastic one. Pure.

Nothing else in this package asks which of the two a launch is.
"""

from __future__ import annotations

from msgspec import Struct


class NodesPolicy(Struct, frozen=True, kw_only=True):
    """What a change of the nodes means to a launch: :data:`FIXED` or :data:`ELASTIC`."""

    needs_all: bool
    """Whether the launch needs every one of its nodes, not only node 0."""
    loss_is_failure: bool
    """Whether a generation that a change of the nodes has ended needs a restart to be followed."""
    returns: bool
    """Whether a node that has lost the coordinator ends its ranks and reconnects."""


FIXED = NodesPolicy(needs_all=True, loss_is_failure=True, returns=False)
ELASTIC = NodesPolicy(needs_all=False, loss_is_failure=False, returns=True)
