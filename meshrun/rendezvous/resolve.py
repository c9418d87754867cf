"""Resolves the coordinator's name, with retries: a pod's may take a while to appear."""

from __future__ import annotations

from collections.abc import Callable

from meshrun.errors import RendezvousError
from meshrun.host.network import Lookup
from meshrun.plan.rendezvous_config import RendezvousConfig
from meshrun.rendezvous.hub import RETRY_S, Hub


class NameResolver:
    """A node that does not know yet whether it is the coordinator.

    Args:
        found: Called with the addresses, and why there are none; returns whether that suffices.
    """

    def __init__(
        self, config: RendezvousConfig, hub: Hub, found: Callable[[list[str], str], bool]
    ) -> None:
        self._config, self._hub, self._found = config, hub, found
        self._deadline = self._hub.deadline(config.timeout_s)
        self._why = "the name service has not answered yet"
        self._lookup: Lookup | None = None
        self._tries = hub.reactor.every(RETRY_S, self._try)

    def _try(self) -> None:
        """Look the name up unless a lookup is still running, and note the wait; or fail."""
        config, waited_s = self._config, self._deadline.waited_s
        if self._deadline.is_over:
            self.close()
            self._hub.fail(
                RendezvousError(
                    f"the name `{config.host}` does not resolve after {waited_s:.0f} s:"
                    f" {self._why}",
                    hint="use an address instead of a name: --rdzv-endpoint ADDRESS:PORT",
                )
            )
            return
        if self._deadline.note_is_due():
            self._hub.note(
                f"waiting for the name `{config.host}` to resolve: {self._why} ({self._deadline})"
            )
        if self._lookup is None:
            host = (config.host or "").strip("[]")
            self._lookup = Lookup(host, self._hub.reactor, self._looked_up)

    def _looked_up(self, addresses: list[str], why: str) -> None:
        self._lookup, self._why = None, why
        if self._found(addresses, why):
            self.close()

    @property
    def all_notified(self) -> bool:
        """Whether no other node can be notified any more that this one withdraws."""
        return self._deadline.is_over

    def close(self) -> None:
        """Stop the lookup."""
        self._tries.cancel()
        if self._lookup is not None:
            self._lookup.close()
