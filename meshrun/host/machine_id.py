"""Identity of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from meshrun.host.sysfs import read_text


def boot_id() -> str:
    """Return a random string that changes with each boot; "" if unknown."""
    return read_text(Path("/proc/sys/kernel/random/boot_id"))


def own_namespaces() -> list[str]:
    """Return the namespaces by which a container appears to be a machine of its own."""
    try:
        return [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
    except OSError:
        return []
