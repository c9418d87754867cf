"""The names of meshrun's environment variables that are no option's and describe no rank."""

from __future__ import annotations

OPEN_STORE = "MESHRUN_OPEN_STORE"
NATIVE_STACKS = "MESHRUN_NATIVE_STACKS"
FULL_EXIT = "MESHRUN_FULL_EXIT"
SECRET = "MESHRUN_SECRET"  # noqa: S105 - a name
SECRET_FILE = "MESHRUN_SECRET_FILE"  # noqa: S105 - a name
DATA_DIMS = "MESHRUN_DATA_DIMS"

PARENT_PID = "MESHRUN_PARENT_PID"
"""The process id of the ``launch()`` or the agent whose child a launcher is."""
PARENT_FOLDER = "MESHRUN_PARENT_FOLDER"
"""The parent's private folder, for the files of ``protocol/caller.py``."""
HOSTS_PRESENT = "MESHRUN_HOSTS_PRESENT"
"""The hosts of a ``--hosts`` launch that run ranks at its start; `` quiet`` on all but one."""
LISTENER = "MESHRUN_LISTENER"
"""The descriptor of a socket that an agent has opened at the endpoint, for its launcher."""
NODE_ADDRESS = "MESHRUN_NODE_ADDRESS"
"""The address at which others reach an agent's host, if known."""
STEP = "MESHRUN_STEP"
"""The name of the Slurm step, set for its launchers if a meshrun process waits for srun."""
LAUNCH_MARK = "MESHRUN_LAUNCH_MARK"
"""A random value, set for everything that a launch starts, to find leftovers."""
CALL_FOLDER = "MESHRUN_CALL_FOLDER"
"""A copy of the call's folder on this node, if it is not the caller's node."""
SERVE = "MESHRUN_SERVE"
"""The caller's folder, in a rank that serves instead of running its program."""
WATCH_FILE = "MESHRUN_WATCH_FILE"
"""The file to which ranks append ``MTIME_NS PATH`` and NUL for each file that they run."""
CHECK_FILE = "MESHRUN_CHECK_FILE"
"""The file to which rank 0 writes the measurements of all ranks."""

WORKER_PID = "MESHRUN_WORKER_PID"
"""The process id of a rank, by which a process that it forks knows that it is none."""

SWITCHES = (OPEN_STORE, NATIVE_STACKS, FULL_EXIT)
"""Variables of users that are true or false."""
SECRET_VARIABLES = (SECRET, SECRET_FILE)
"""Variables by which launchers on several nodes authenticate; ranks do not get them."""
USER_VARIABLES = (*SWITCHES, *SECRET_VARIABLES, DATA_DIMS)
"""Variables that users set."""
BETWEEN_LAUNCHERS = frozenset({
    PARENT_PID, PARENT_FOLDER, HOSTS_PRESENT, LISTENER, NODE_ADDRESS, STEP, LAUNCH_MARK,
    CALL_FOLDER, SERVE, WATCH_FILE, CHECK_FILE,
})  # fmt: skip
"""Variables that one process of meshrun sets for another."""
