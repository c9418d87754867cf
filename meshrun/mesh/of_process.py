"""The one mesh of this process, as far as it has been built."""

from __future__ import annotations

import threading

from meshrun.mesh.build import BuiltMesh


class Process:
    """What all threads share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.built: BuiltMesh | None = None


process = Process()
