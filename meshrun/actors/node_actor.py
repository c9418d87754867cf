"""The actor on each node: runs one process there, and carries what it reads and writes.

Its class travels to the nodes by value, so that a node without meshrun can say so. The process
reads from a pipe that this one holds, and so learns of this one's end, however it comes.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

_CHUNK = 256 * 1024
_OUT, _ERR = 1, 2
_THREADS = "OMP_NUM_THREADS"


class NodeActor:
    """One process on a node; ``read`` is called beside the other methods, these in order."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._streams = selectors.DefaultSelector()
        self._holder = contextlib.ExitStack()
        self._folder = ""

    def find_node(self) -> str:
        """Return the id of the node that this is on."""
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
            words: Its arguments.
            env: Variables in addition to those of this process.
            cpus: How many this actor has of Ray.
            workers: Among how many ranks they are shared.
            files: The variable that says where these files are, and the files by name.
        """
        whole = {**os.environ, **env}
        if whole.get(_THREADS) == str(cpus):  # which Ray sets, as for one worker
            whole[_THREADS] = str(max(1, cpus // workers))
        if files is not None:
            from meshrun.host.folder import open_private
            from meshrun.host.leftovers import private_folder

            variable, contents = files
            self._folder = whole[variable] = self._holder.enter_context(private_folder())
            for name, content in contents.items():
                with open(os.path.join(self._folder, name), "wb", opener=open_private) as file:
                    file.write(content)
        self._process = subprocess.Popen(
            [sys.executable, *words],
            env=whole,
            cwd="/",  # nobody's modules are found there
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # what ends this process has to leave it time
            bufsize=0,
        )
        for kind, pipe in ((_OUT, self._process.stdout), (_ERR, self._process.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._streams.register(pipe, selectors.EVENT_READ, kind)

    def write(self, data: bytes) -> None:
        """Pass on what the process is to read; nothing means that no more follows."""
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
        """Wait for what the process writes; its exit code once it has written all."""
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
        """Return the names of all files in the folder that ``start`` made."""
        return sorted(os.listdir(self._folder)) if self._folder else []

    def read_file(self, name: str) -> bytes:
        """Return one of these files."""
        from meshrun.host.folder import open_private

        with open(os.path.join(self._folder, name), "rb", opener=open_private) as file:
            return file.read()

    def close(self) -> None:
        """Remove the folder."""
        self._holder.close()
