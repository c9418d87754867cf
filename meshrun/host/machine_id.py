"""What tells machines apart."""

from __future__ import annotations

import os


def boot_id() -> str:
    """Return a random text that is the same until the next boot; nothing if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:  # another system than Linux
        return ""


def own_namespaces() -> list[str]:
    """Return the namespaces that make a container look like a machine."""
    try:
        return [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
    except OSError:
        return []
