"""The folder of one launch, with its error files and log files, and their removal.

A ``torchrun.logs_specs`` plug-in, which runs in another process, may choose the files.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from meshrun.errors import HostError, UsageError
from meshrun.host.entry_points import entry_points
from meshrun.host.folder import Folder, keep_from_aging, lock_folder, make_folder, temporary_path
from meshrun.host.named_files import absolute, who_else_may_write
from meshrun.plan import log_files
from meshrun.plan.parse import Streams
from meshrun.plan.plan import LaunchPlan
from meshrun.plan.request import LogRequest
from meshrun.protocol.packing import convert, read_json, to_builtins
from meshrun.start import own_command


def make_run_folder(plan: LaunchPlan, run_id: str) -> RunFolder:
    """Return the folder of a launch.

    Raises:
        UsageError: If ``--log-dir`` cannot hold it, or others could replace it.
    """
    request, logs, plugin = plan.request, plan.request.logs, None
    if (
        logs.log_dir not in (None, os.devnull)
        and not logs.allow_shared
        and (who := who_else_may_write(logs.log_dir or ""))
    ):
        raise UsageError(
            f"--log-dir `{logs.log_dir}` is not safe: {who}, so others could replace log files",
            hint="use a folder that only you can write to, or add --allow-shared-log-dir",
        )
    if logs.logs_specs is not None:
        nproc = plan.layout.nproc_per_node[plan.node_rank]
        plugin = LogsPlugin(logs, request.console.local_ranks, nproc)
    if plan.rendezvous is None:
        return RunFolder(logs, run_id, plugin=plugin)
    # Nodes may share a file system, but do not share a run id yet unless the user set one.
    name = request.rendezvous.run_id or ""
    return RunFolder(logs, name, host=os.uname().nodename, plugin=plugin)


class RunFolder:
    """The folder, made before ranks start. A temporary one is removed after a successful launch."""

    def __init__(
        self, logs: LogRequest, run_id: str, *, host: str = "", plugin: LogsPlugin | None = None
    ) -> None:
        """Choose the folder; make it if the user named its parent.

        Args:
            logs: What to write to files, and where.
            run_id: The run id; "" if the nodes do not share one yet.
            host: This node's host name, if there are several nodes.
            plugin: The plug-in that chooses the files, if the user named one.

        Raises:
            UsageError: If ``--log-dir`` cannot hold it.
        """
        self._logs = logs
        self._plugin = plugin
        self._chosen: dict[int, log_files.RankFiles] = {}
        self._is_temporary = logs.log_dir is None
        self._has_room = True
        """Whether there was room for the folders of this generation."""
        self.path = temporary_path()
        self._folder: Folder | None = None
        if logs.log_dir not in (None, os.devnull) and plugin is None:
            self._folder = _make_run_folder(
                absolute(logs.log_dir or ""), log_files.run_folder_prefix(run_id, host)
            )
            self.path = self._folder.path

    @property
    def cleanup_path(self) -> str:
        """The path that the zygote removes if the launcher dies; "" for none."""
        return self.path if self._is_temporary and not self._logs.writes_files else ""

    def make(self, generation: int, envs: Mapping[int, Mapping[str, str]]) -> None:
        """Make the folders of one generation, given the environment of each local rank.

        If the disk is full, a folder that would hold only ``error.json`` is not made.

        Raises:
            HostError: If there is no room for logs, or the place is not writable.
        """
        if self._plugin is not None:
            self._chosen = self._plugin.choose(envs)
            return
        if self._logs.log_dir == os.devnull:
            return
        attempt = log_files.attempt_folder(self.path, generation)
        self._has_room = True
        try:
            if self._folder is not None and self._folder.is_gone:  # others have cleaned up
                self._close()
                _make_private_folders(os.path.dirname(self.path))
            if self._folder is None:
                self._folder = make_folder(self.path)
                (lock_folder if self.cleanup_path else keep_from_aging)(self._folder)
            for folder in (attempt, *(f"{attempt}/{rank}" for rank in envs)):
                self._folder.make(os.path.relpath(folder, self.path))
        except OSError as error:
            if self.cleanup_path and error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._has_room = False
                return
            raise HostError(
                f"cannot create `{attempt}`: {error.strerror}",
                hint="set TMPDIR or --log-dir to a writable folder with free space",
            ) from error

    def files(self, generation: int, local_rank: int) -> log_files.RankFiles:
        """Return the files of one rank."""
        if self._plugin is not None:
            return self._chosen[local_rank]
        logs = self._logs if self._has_room else replace(self._logs, log_dir=os.devnull)
        return log_files.rank_files(logs, self.path, generation, local_rank)

    def open(self, path: str, flags: int) -> int:
        """Open a file that :meth:`files` names; a new file is private.

        Raises:
            OSError: If it cannot be opened.
        """
        if self._plugin is not None or self._folder is None:
            if flags & os.O_APPEND:  # a plug-in may give every generation of ranks the same file
                flags &= ~os.O_EXCL
            return os.open(path, flags | os.O_CLOEXEC, 0o600)
        return self._folder.open(path, flags)

    def close(self, *, went_well: bool) -> str | None:
        """Remove what is no longer needed; return the folder if it holds logs."""
        if self._plugin is not None:
            self._plugin.close()
        is_kept = not self._is_temporary or (not went_well and self._logs.writes_files)
        is_there = self._folder is not None and not self._folder.is_gone
        path = self.path if is_kept and is_there and self._logs.writes_files else None
        if self._folder is not None and not is_kept:
            self._folder.remove()
        self._close()
        return path

    def _close(self) -> None:
        if self._folder is not None:
            self._folder.close()
            self._folder = None


def _make_run_folder(log_dir: str, prefix: str) -> Folder:
    if os.path.isfile(log_dir):
        raise UsageError(f"--log-dir `{log_dir}` is a file, not a folder", hint="use a folder")
    try:
        _make_private_folders(log_dir)
        return make_folder(os.path.join(log_dir, f"{prefix}{os.urandom(4).hex()}"))
    except OSError as error:
        hint = "use a writable folder with free space"
        if error.errno == errno.ENAMETOOLONG:
            hint = "use a shorter --log-dir or --rdzv-id"
        raise UsageError(
            f"cannot write to --log-dir `{log_dir}`: {error.strerror}", hint=hint
        ) from error


def _make_private_folders(path: str) -> None:
    """Make a folder and missing parents, all private; existing ones keep their mode."""
    with suppress(FileNotFoundError):
        os.stat(path)  # fails before any is made if the path is too long
    for folder in (*reversed(Path(path).parents), Path(path)):
        if not os.path.exists(folder):
            try:
                os.mkdir(folder, 0o700)
            except FileExistsError:  # another launch made it
                if not os.path.isdir(folder):
                    raise


class LogsPlugin:
    """Asks the plug-in for the files of each generation of ranks."""

    def __init__(self, logs: LogRequest, local_ranks: frozenset[int] | None, nproc: int) -> None:
        """Start the plug-in; it imports torch while the launch continues.

        Raises:
            UsageError: If no package has a plug-in of this name.
        """
        self._name = logs.logs_specs or ""
        if self._name not in entry_points(log_files.PLUG_INS):
            raise UsageError(
                f"--logs-specs: no plugin named `{self._name}`",
                hint="an installed package must register it as an entry point in"
                f" {log_files.PLUG_INS}",
            )
        self._process = subprocess.Popen(
            own_command("logs-plugin", self._name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        self._send(
            log_files.PluginOptions(
                log_dir=logs.log_dir,
                redirects=_choice(logs.redirects, nproc),
                tee=_choice(logs.tee, nproc),
                local_ranks=sorted(local_ranks or ()),
            )
        )

    def choose(self, envs: Mapping[int, Mapping[str, str]]) -> dict[int, log_files.RankFiles]:
        """Return the files of each local rank, given the environments of all.

        Raises:
            HostError: If the plug-in fails.
        """
        self._send(envs)
        answer = self._process.stdout.readline() if self._process.stdout else ""
        if not answer:
            raise HostError(
                f"the --logs-specs plugin `{self._name}` failed",
                hint="see its traceback above",
            )
        files: dict[int, log_files.RankFiles] = convert(
            dict[int, log_files.RankFiles], read_json(answer)
        )
        return files

    def _send(self, value: object) -> None:
        try:
            print(json.dumps(to_builtins(value)), file=self._process.stdin, flush=True)
        except BrokenPipeError:  # the missing answer shows it
            pass

    def close(self) -> None:
        """End the plug-in."""
        if self._process.stdin:
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()


def _choice(streams: Streams, nproc: int) -> int | dict[int, int]:
    if not streams.of_ranks:
        return streams.everywhere
    return {rank: streams.of(rank) for rank in range(nproc)}
