"""The store process: serves the ranks' store, a torch TCPStore, and guards the launch."""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING, NoReturn

from meshrun.errors import HostError, UsageError
from meshrun.host.descriptors import allow_many_descriptors, note
from meshrun.host.network import address_of, names_from_files_only
from meshrun.host.processes import set_title
from meshrun.host.shortage import TOO_FEW_PROCESSES
from meshrun.worker.torch_version import check_torch_version
from meshrun.zygote.guard import Guard

if TYPE_CHECKING:
    from torch.distributed import Store

_LOOPBACK_FOR = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not bound here


def serve_store(listen_fd: int) -> Store:
    """Serve the ranks' store on a listening socket, whose descriptor the store will own.

    torch then connects to its own store, and gives up after 5 minutes if it cannot.
    """
    import torch.distributed as dist

    check_torch_version()
    with socket.socket(fileno=os.dup(listen_fd)) as listener:
        name = listener.getsockname()
    address = address_of(name)
    return dist.TCPStore(
        _LOOPBACK_FOR.get(address, address),
        name[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )


def run_store(listeners: list[int], guard: Guard) -> NoReturn:
    """Guard the launch until the zygote ends; serve the store if there is a listener for it."""
    set_title("store")
    allow_many_descriptors()  # connections from outsiders must not keep ranks out
    # torch's server would look up the name of the first rank, and serve no other in the meantime.
    with names_from_files_only():
        try:
            _kept = [serve_store(listen_fd) for listen_fd in listeners]
        except RuntimeError as error:  # torch could not start its thread, or connect to itself
            _fail(f"{error}; {TOO_FEW_PROCESSES}")
        except (ImportError, UsageError) as error:  # unlike forks, new interpreters import it here
            _fail(f"{error} ({sys.executable})")
        guard.run()


def _fail(why: str) -> NoReturn:
    note(f"cannot serve the ranks' store: {why}")
    os._exit(HostError.exit_code)
