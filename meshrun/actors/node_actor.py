"""The actor on each node: runs one process, and carries its streams.

The class is pickled by value, so that the process can report that a node lacks meshrun: outside of
functions, it uses nothing of meshrun's but constants, and waits with a selector of its own. The
process reads from a pipe of the actor's, and so notices the actor's end, whatever the cause.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

from meshrun.host import rank_variables as var

_CHUNK = 256 * 1024
_OUT, _ERR = 1, 2
_OMP_NUM_THREADS = var.OMP_NUM_THREADS


class NodeActor:
    """One process on a node.

    ``read`` runs concurrently with the other methods, which run one after another.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._streams = selectors.DefaultSelector()
        self._closing = contextlib.ExitStack()
        self._folder = ""

    def find_node(self) -> str:
        """Return the id of the actor's node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def start(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        *,
        cpus: int,
        workers: int,
        files: tuple[str, Mapping[str, bytes]] | None,
    ) -> None:
        """Run this interpreter.

        Args:
            words: The arguments.
            env: Variables in addition to those of the actor.
            cpus: The number of CPUs that Ray has assigned to the actor.
            workers: The number of ranks that share them.
            files: Files to write, by name, with the variable that names their folder.
        """
        whole = {**os.environ, **env}
        if whole.get(_OMP_NUM_THREADS) == str(cpus):  # set by Ray, as for a single process
            whole[_OMP_NUM_THREADS] = str(max(1, cpus // workers))
        if files is not None:
            from meshrun.host.folder import private_folder, write_private

            variable, contents = files
            self._folder = whole[variable] = self._closing.enter_context(private_folder())
            for name, content in contents.items():
                write_private(os.path.join(self._folder, name), content)
        self._process = subprocess.Popen(
            [sys.executable, *words],
            env=whole,
            cwd="/",  # where no modules are found
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # it must get time to exit after the actor's end
            bufsize=0,
        )
        for kind, pipe in ((_OUT, self._process.stdout), (_ERR, self._process.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._streams.register(pipe, selectors.EVENT_READ, kind)

    def write(self, data: bytes) -> None:
        """Write to the process's stdin; ``b""`` closes it."""
        if self._process is None or self._process.stdin is None or self._process.stdin.closed:
            return
        stdin = self._process.stdin
        try:
            while data:
                data = data[stdin.write(data) :]
                if not data:
                    return
        except BrokenPipeError:
            pass
        stdin.close()

    def read(self) -> list[tuple[int, bytes]] | int:
        """Wait for output of the process, (stream, data); return its exit code after the last."""
        if not self._streams.get_map():
            return self._process.wait() if self._process is not None else 0
        found = []
        for key, _ in self._streams.select():
            pipe: IO[bytes] | Any = key.fileobj
            if data := os.read(pipe.fileno(), _CHUNK):
                found.append((key.data, data))
            else:
                self._streams.unregister(pipe)
                pipe.close()
        return found

    def list_files(self) -> list[str]:
        """Return the names of all files in the folder that ``start`` has created."""
        return sorted(os.listdir(self._folder)) if self._folder else []

    def read_file(self, name: str) -> bytes:
        """Return one of these files."""
        from meshrun.host.folder import read_private

        return read_private(os.path.join(self._folder, name))

    def close(self) -> None:
        """Remove the folder."""
        self._closing.close()
