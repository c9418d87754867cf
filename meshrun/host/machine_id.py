"""Identity of this machine."""

from __future__ import annotations

import os


def boot_id() -> str:
    """Return a random string that changes with each boot; "" if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:  # not Linux
        return ""


def own_namespaces() -> list[str]:
    """Return the namespaces by which a container appears to be a machine of its own."""
    try:
        return [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
    except OSError:
        return []
