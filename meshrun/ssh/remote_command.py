"""The command that runs on each host, what starts it there, and its environment."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from meshrun.errors import UsageError
from meshrun.host.entry_points import call, entry_points, load
from meshrun.host.own_variables import (
    HOSTS_PRESENT,
    LISTENER,
    PARENT_FOLDER,
    PARENT_PID,
    SECRET_FILE,
)
from meshrun.host.visibility import CUDA, XPU
from meshrun.plan.choices import STARTERS_OF_SCHEDULERS
from meshrun.plan.hostfile import Host
from meshrun.plan.request import RemoteHosts

EXPORTED = (
    "PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "VIRTUAL_ENV", "CONDA_PREFIX",
    "PYTHON*", "MESHRUN_*", "PET_*", "TORCH*", "PYTORCH*", "TRITON*",
    "NCCL_*", "GLOO_*", "UCX_*", "UCC_*", "FI_*", "OMP_*", "MKL_*", "KMP_*",
    "CUDA_*", "NVIDIA_*", "HIP_*", "HSA_*", "ROCR_*", "MIOPEN_*", "ZE_*",
)  # fmt: skip
"""Names of variables that go to every host."""
_OWN = (
    SECRET_FILE, PARENT_PID, PARENT_FOLDER, LISTENER, HOSTS_PRESENT,
    "SSH_*", "SLURM_*", "PMIX_*", "PMI_*", "OMPI_*", "PRTE_*", "MPI_LOCAL*", "HYDRA_*", "MV2_*",
    "PALS_*", "FLUX_*", "JSM_*", "LSB_*", "PBS_*", "PE_HOSTFILE",
)  # fmt: skip
"""Names of variables that never do: they concern the controller or its host alone.

``cli/`` unsets those of options, in the controller and in the launchers that agents start.
"""
_OF_A_HOST = (
    "HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "HOSTNAME", "HOST", "TMPDIR", "TERM",
    "SHLVL", "_", "DISPLAY", "XAUTHORITY", "XDG_*", "DBUS_*", "MAIL", "TTY", "TMUX*", "STY",
)  # fmt: skip
"""Names of variables that a pattern such as ``*`` does not match."""
NO_STDIN = "its stdin is empty"
"""What an agent prints that receives no first line."""
_BOOT = (
    "import sys;"
    "sys.path[:]=[path for path in sys.path if path];"
    "import json;"
    "line=open(0,'rb',0,closefd=False).readline();"
    f"line or sys.exit('{NO_STDIN}');"
    "first=json.loads(line);"
    "sys.path[:0]=first['path'];"
    "from meshrun.ssh.agent import main;"
    "from meshrun import __version__;"
    "main(first,__version__)"
)
"""Reads unbuffered, to leave what follows the first line, and imports nothing from the working
directory."""
BOOT_FOLDER = "/"
"""The working directory: Python 3.13 imports from it before the first line, and no user can write
to this one."""
PLUG_INS = "meshrun.launchers"
"""The group of entry points for functions from (host, line) to a command."""
Starter = Callable[[Host, str], list[str]]
"""Returns the local command that runs a line in a shell on a host.

Its stdin, stdout and stderr are those of the line there, and it exits when the line does.
"""


def boot_command(interpreter: str) -> list[str]:
    """Return the command that starts an agent."""
    return [interpreter, "-c", _BOOT]


def agent_command(interpreter: str) -> str:
    """Return the line for a host's shell that starts an agent, without secrets."""
    return f"cd {BOOT_FOLDER}; exec {shlex.join(boot_command(interpreter))}"


def ssh_command(
    ssh: Sequence[str], host: Host, command: str, connect_timeout_s: float
) -> list[str]:
    """Return the command that runs a line in a shell on a host."""
    seconds = max(1, int(connect_timeout_s) - 1)  # ssh reports a better error than we can
    options = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={seconds}"]
    return [*ssh, *options, "--", host.destination, command]


def exported(env: Mapping[str, str], requested: Sequence[str]) -> dict[str, str]:
    """Return the variables that go to every host.

    ``requested`` are further names, or patterns such as ``WANDB_*``.

    Raises:
        UsageError: If a requested variable is not set.
    """
    wanted = requested_variables(env, requested)
    return {
        name: value
        for name, value in env.items()
        if name in wanted or (_matches(name, EXPORTED) and not _matches(name, _OWN))
    }


def requested_variables(env: Mapping[str, str], requested: Sequence[str]) -> dict[str, str]:
    """Return the variables that ``--export`` names or matches.

    Raises:
        UsageError: If a requested variable is not set.
    """
    for name in requested:
        if "=" in name:
            only = name.partition("=")[0]
            raise UsageError(
                f"--export expects variable names, found `{only}=...`",
                hint=f"run {only}=... meshrun --export {only} ...; every user can read arguments",
            )
        if name not in env and not set(name) & set("*?["):
            raise UsageError(f"--export {name}: the variable is not set")
    return {
        name: value
        for name, value in env.items()
        if (name in requested or (_matches(name, requested) and not _matches(name, _OF_A_HOST)))
        and not _matches(name, _OWN)
    }


def without_own(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without variables of another launch or the controller."""
    return {name: value for name, value in env.items() if not _matches(name, _OWN)}


def devices_of(host: Host) -> dict[str, str]:
    """Return the variables that show a host's launcher only the chosen devices."""
    if host.chosen is None:
        return {}
    return dict.fromkeys((CUDA, XPU), ",".join(map(str, host.chosen)))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def find_starter(remote: RemoteHosts) -> Starter:
    """Return the function that makes the commands to start a launch's agents.

    Raises:
        UsageError: If it is unknown, or cannot be loaded.
    """
    if remote.start_command:
        return lambda host, _: [*remote.start_command, host.destination]
    access = remote.access
    if access.starter in ("", "ssh"):
        return lambda host, line: ssh_command(access.ssh, host, line, access.connect_timeout_s)
    if access.starter in STARTERS_OF_SCHEDULERS:
        words = STARTERS_OF_SCHEDULERS[access.starter]
        return lambda host, line: [*words, host.destination, line]
    found = entry_points(PLUG_INS)
    if access.starter not in found:
        known = ", ".join(("ssh", *STARTERS_OF_SCHEDULERS, *found))
        raise UsageError(
            f"--launcher: unknown launcher `{access.starter}`",
            hint=f"use {known}, or install a package with an entry point in {PLUG_INS}",
        )
    plug_in = load(PLUG_INS, access.starter, found[access.starter])

    def start(host: Host, line: str) -> list[str]:
        args, returns = (host.destination, line), (list, tuple)
        return [*map(str, call(PLUG_INS, access.starter, plug_in, *args, returns=returns))]

    return start
