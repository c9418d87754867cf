"""The command that runs on each host, and the variables it gets. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from meshrun.errors import UsageError
from meshrun.host.visibility import CUDA, XPU
from meshrun.plan.hostfile import Host

EXPORTED = (
    *("PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("PYTHON*", "MESHRUN_*", "PET_*", "TORCH*", "PYTORCH*", "TRITON*"),
    *("NCCL_*", "GLOO_*", "UCX_*", "UCC_*", "FI_*", "OMP_*", "MKL_*", "KMP_*"),
    *("CUDA_*", "NVIDIA_*", "HIP_*", "HSA_*", "ROCR_*", "MIOPEN_*", "ZE_*"),
)
"""Names of variables that go to every host."""
_OWN = (
    *("MESHRUN_HOSTS", "MESHRUN_HOSTFILE", "MESHRUN_INCLUDE", "MESHRUN_EXCLUDE", "MESHRUN_SSH"),
    *("MESHRUN_EXPORT", "MESHRUN_CONNECT_TIMEOUT", "MESHRUN_REPORT", "MESHRUN_PARENT_*"),
    *("MESHRUN_SECRET_FILE", "MESHRUN_LISTENER", "MESHRUN_HOSTS_PRESENT"),
    *("PET_NNODES", "PET_NODE_RANK", "PET_STANDALONE"),
    *("SSH_*", "SLURM_*", "PMIX_*", "PMI_*", "OMPI_*", "PRTE_*", "MPI_LOCAL*", "HYDRA_*", "MV2_*"),
    *("PALS_*", "FLUX_*", "JSM_*", "LSB_*", "PBS_*", "PE_HOSTFILE"),
)
"""Names of those that never do: they say what holds for the controller or its host alone."""
_OF_A_HOST = (
    *("HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "HOSTNAME", "HOST", "TMPDIR", "TERM"),
    *("SHLVL", "_", "DISPLAY", "XAUTHORITY", "XDG_*", "DBUS_*", "MAIL", "TTY", "TMUX*", "STY"),
)
"""Names of those that a pattern such as ``*`` does not mean."""
ADDRESS = "MESHRUN_NODE_ADDRESS"
"""Says to an agent by which address of its host others reach it, where that is known."""
_BOOT = (
    "import sys;"
    "sys.path[:]=[path for path in sys.path if path];"
    "import json;"
    "order=json.loads(open(0,'rb',0,closefd=False).readline());"
    "sys.path[:0]=order['path'];"
    "from meshrun.ssh.agent import main;"
    "from meshrun import __version__;"
    "main(order,__version__)"
)
"""Unbuffered, so that nothing of what follows is taken; and without the folder it is run in."""
BOOT_FOLDER = "/"
"""Where that is: Python 3.13 imports from it before the first line, and this one is nobody's."""


def boot_command(interpreter: str) -> list[str]:
    """Return the words that start an agent."""
    return [interpreter, "-c", _BOOT]


def agent_command(interpreter: str) -> str:
    """Return the line for a host's shell that starts an agent; there is nothing secret in it."""
    return f"cd {BOOT_FOLDER}; exec {shlex.join(boot_command(interpreter))}"


def ssh_command(
    ssh: Sequence[str], host: Host, command: str, connect_timeout_s: float
) -> list[str]:
    """Return the words that run a line in a shell on a host."""
    seconds = max(1, int(connect_timeout_s) - 1)  # so that ssh says what is wrong before we do
    options = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={seconds}"]
    return [*ssh, *options, "--", host.destination, command]


def exported(env: Mapping[str, str], asked: Sequence[str]) -> dict[str, str]:
    """Return the variables that go to every host.

    Args:
        env: This environment.
        asked: Further names, or patterns such as ``WANDB_*``.

    Raises:
        UsageError: If a name is asked for that is not set.
    """
    wanted = asked_for(env, asked)
    return {
        name: value
        for name, value in env.items()
        if name in wanted or (_matches(name, EXPORTED) and not _matches(name, _OWN))
    }


def asked_for(env: Mapping[str, str], asked: Sequence[str]) -> dict[str, str]:
    """Return the variables that ``--export`` names or matches.

    Raises:
        UsageError: If a name is asked for that is not set.
    """
    for name in asked:
        if "=" in name:
            only = name.partition("=")[0]
            raise UsageError(
                f"--export expects variable names, found `{only}=...`",
                hint=f"run {only}=... meshrun --export {only} ...; every user can read arguments",
            )
        if name not in env and not set(name) & set("*?["):
            raise UsageError(f"--export {name}: the variable is not set")
    found = {}
    for name, value in env.items():
        is_asked_for = name in asked or (_matches(name, asked) and not _matches(name, _OF_A_HOST))
        if is_asked_for and not _matches(name, _OWN):
            found[name] = value
    return found


def without_own(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what holds for another launch, or for the controller alone."""
    return {name: value for name, value in env.items() if not _matches(name, _OWN)}


def devices_of(host: Host) -> dict[str, str]:
    """Return the variables that show a host's launcher the slots that were chosen."""
    if host.chosen is None:
        return {}
    return dict.fromkeys((CUDA, XPU), ",".join(map(str, host.chosen)))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
