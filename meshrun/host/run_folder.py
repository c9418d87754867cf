"""The folder of one launch: error files, log files, and when they go."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping

from meshrun.errors import HostError, UsageError
from meshrun.host.leftovers import PREFIX, hold, let_go
from meshrun.host.logs_plugin import LogsPlugin
from meshrun.logs import RankFiles, attempt_folder, rank_files, run_folder_prefix
from meshrun.request import LogRequest


class RunFolder:
    """Made before ranks start. A temporary one goes with a launch that went well."""

    def __init__(
        self, logs: LogRequest, run_id: str, *, host: str = "", plugin: LogsPlugin | None = None
    ) -> None:
        """Decide on the folder, and make it where the user named the place.

        Args:
            logs: What goes to files, and where.
            run_id: Name of the launch; "" if nodes do not know a common one yet.
            host: This node's name, where there are several.
            plugin: Chooses the files, if one was named.

        Raises:
            UsageError: If ``--log-dir`` cannot hold it.
        """
        self._logs = logs
        self._plugin = plugin
        self._chosen: dict[int, RankFiles] = {}
        self._is_temporary = logs.log_dir is None
        self.path = os.path.join(_temporary_place(), f"{PREFIX}{secrets.token_hex(8)}")
        self._held = -1
        if logs.log_dir not in (None, os.devnull) and plugin is None:
            self.path = _make_run_folder(
                os.path.abspath(logs.log_dir or ""), run_folder_prefix(run_id, host)
            )

    @property
    def removed_without_us(self) -> str:
        """What the zygote removes if the launcher is gone; "" for nothing."""
        return self.path if self._is_temporary and not self._logs.writes_files else ""

    def make(self, generation: int, envs: Mapping[int, Mapping[str, str]]) -> None:
        """Make the folders of one generation of ranks, whose environments are given.

        Raises:
            HostError: If the disk is full, or the place is not writable.
        """
        if self._plugin is not None:
            self._chosen = self._plugin.choose(envs)
            return
        if self._logs.log_dir == os.devnull:
            return
        attempt = attempt_folder(self.path, generation)
        try:
            for folder in (self.path, attempt, *(f"{attempt}/{rank}" for rank in envs)):
                if not os.path.isdir(folder):
                    os.mkdir(folder, 0o700)
            if self._held < 0 and self.removed_without_us:
                self._held = hold(self.path)
        except OSError as error:
            raise HostError(
                f"`{attempt}` could not be made: {error.strerror}",
                hint="set TMPDIR or --log-dir to a folder that is writable and has room",
            ) from error

    def files(self, generation: int, local_rank: int) -> RankFiles:
        """Return the files of one rank."""
        if self._plugin is not None:
            return self._chosen[local_rank]
        return rank_files(self._logs, self.path, generation, local_rank)

    def close(self, *, went_well: bool) -> str | None:
        """Remove what nobody needs any more; return the folder if it holds logs."""
        if self._plugin is not None:
            self._plugin.close()
        let_go(self._held)
        if self._is_temporary and (went_well or not self._logs.writes_files):
            shutil.rmtree(self.path, ignore_errors=True)
            return None
        return self.path if self._logs.writes_files and os.path.isdir(self.path) else None


def _temporary_place() -> str:
    """Return where temporary folders go, or would if anything there could be written."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # a read-only file system: who needs the folder says so
        return os.environ.get("TMPDIR") or "/tmp"  # noqa: S108


def _make_run_folder(log_dir: str, prefix: str) -> str:
    if os.path.isfile(log_dir):
        raise UsageError(f"--log-dir `{log_dir}` is a file", hint="name a folder")
    try:
        _make_private_folders(log_dir)
        return tempfile.mkdtemp(prefix=prefix, dir=log_dir)
    except OSError as error:
        raise UsageError(
            f"--log-dir `{log_dir}` cannot hold logs: {error.strerror}",
            hint="name a folder that is writable",
        ) from error


def _make_private_folders(path: str) -> None:
    """Make what is missing of a folder and those above it; what is there keeps its mode."""
    if not os.path.exists(path):
        _make_private_folders(os.path.dirname(path))
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:  # another launch was as quick
            if not os.path.isdir(path):
                raise
