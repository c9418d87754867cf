"""torch's rendezvous handler for an order, or a plug-in's."""

from __future__ import annotations

import contextlib
from typing import Any

from meshrun.plan.rendezvous_config import format_endpoint
from meshrun.protocol.codec import Negotiate


def make_handler(order: Negotiate) -> Any:
    """Return torch's handler, or a plug-in's."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import (
        _register_default_handlers,
        _register_out_of_tree_handlers,
        get_rendezvous_handler,
    )

    with contextlib.suppress(Exception):
        _register_default_handlers()
        _register_out_of_tree_handlers()
    return get_rendezvous_handler(
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
