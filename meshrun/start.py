"""The entry point of each of meshrun's processes, and the command line that starts it.

    python start.py PART [WORD ...]

It is run by its path: ``python -m`` and ``python -c`` put the working folder first on ``sys.path``,
so anyone who can write there could choose what is imported.
"""

from __future__ import annotations

import os
import sys

_KNOWN_AT_START = frozenset(sys.modules)
_PARTS = {
    "launcher": "meshrun.__main__",
    "zygote": "meshrun.zygote.main",
    "warm-server": "meshrun.warm.warm_server",
    "rank": "meshrun.zygote.exec_rank",
    "task": "meshrun.worker.task",
    "devices": "meshrun.zygote.count_devices",
    "logs-plugin": "meshrun.zygote.logs_specs_process",
    "withdraw": "meshrun.rendezvous.torch_withdrawal",
    "ray-driver": "meshrun.actors.driver",
    "ray-relay": "meshrun.actors.relay",
}


def own_command(part: str, *words: str, unbuffered: bool = False) -> list[str]:
    """Return the command that starts one of meshrun's processes with this interpreter.

    Raises:
        HostError: If this module is in an archive, or frozen into a program.
    """
    file = os.path.abspath(__file__)
    if not os.path.isfile(file):
        from meshrun.errors import HostError

        raise HostError(
            f"meshrun cannot start its processes: there is no file `{file}`",
            hint="install it with pip: meshrun cannot run from a zip archive (unless unpacked"
            " first, as shiv does) or a frozen executable",
        )
    return [sys.executable, *["-u"] * unbuffered, file, part, *words]


def _import_package() -> None:
    """Import the package of this file, even if ``sys.path`` has another meshrun before it.

    Its parent replaces this file's folder on ``sys.path``, at the end, where it shadows nothing.
    """
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    package_parent = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if package_parent not in sys.path:
        sys.path.append(package_parent)
    if (spec := PathFinder.find_spec("meshrun", [package_parent])) and spec.loader:
        sys.modules["meshrun"] = package = module_from_spec(spec)
        spec.loader.exec_module(package)


if __name__ == "__main__":
    _import_package()
    from importlib import import_module

    # In a forked rank, main() returns a function, so that the program runs from module level.
    run = import_module(_PARTS[sys.argv.pop(1)]).main(_KNOWN_AT_START)
    while run is not None:
        run = run()
