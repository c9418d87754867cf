"""``--warm-status`` and ``--warm-stop``."""

from __future__ import annotations

import time
from contextlib import suppress

from meshrun.errors import HostError
from meshrun.warm.server_folder import ServerFolder, default_server_folder, stop_server
from meshrun.wording import columns, count, duration, size


def render_servers() -> str:
    """Return a table of this user's warm servers and what they have imported."""
    folder = _open_folder()
    servers, starting = folder.servers(), folder.starting()
    if not servers and not starting:
        return "no warm servers"
    rows = [("PID", "AGE", "IDLE", "ENDS AFTER", "MEMORY", "PACKAGES")]
    now = time.time()
    for found in servers:
        server = found.server
        rows.append(
            (
                str(server.pid),
                _age(now - server.began),
                _age(now - found.used),
                f"{duration(server.idle_s)} idle",
                _memory(server.pid),
                ", ".join(("torch", *server.extra)),
            )
        )
    rows.extend((str(pid), "", "", "", _memory(pid), "(importing)") for pid in starting)
    return "\n".join(columns(rows))


def stop_servers() -> str:
    """End the warm servers of this user, and forget what programs imported.

    Returns:
        A message with their number.

    Raises:
        HostError: If one does not end.
    """
    folder = _open_folder()
    servers = [*folder.starting(), *(found.server.pid for found in folder.servers())]
    left = [pid for pid in servers if not stop_server(folder, pid)]
    if left:
        raise HostError(
            f"{count(len(left), 'warm server')} did not end after SIGKILL:"
            f" {', '.join(map(str, left))}",
            hint="the kernel cannot kill it, perhaps because a network file system hangs",
        )
    folder.remove()
    return f"stopped {count(len(servers), 'warm server')}"


def _open_folder() -> ServerFolder:
    try:
        return ServerFolder(default_server_folder())
    except OSError as error:
        raise HostError(f"cannot use the folder of warm servers: {error}") from error


def _age(seconds: float) -> str:
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 120 else f"{whole // 60} min"


def _memory(pid: int) -> str:
    import psutil

    with suppress(psutil.Error):
        return size(psutil.Process(pid).memory_info().rss)
    return "?"
