"""Print as JSON how many seconds a task took, and the peak memory of its process.

``layout_program.py ask MESH NNODES`` queries a layout for every rank, in this process and without
torch; ``layout_program.py run COMMAND ...`` runs a command and discards its output.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time


def ask(mesh: str, nnodes: int) -> None:
    """Build the layout; look up each rank's coordinate, and its index and group along each dim."""
    from meshrun import Layout

    layout = Layout.parse(mesh, nnodes=nnodes)
    for rank in range(layout.world_size):
        layout.coordinate(rank)
        for dim in layout.shape:
            layout.dim_rank(dim, rank)
            layout.group(dim, rank)


def main() -> None:
    """Run the task on the command line once."""
    what, *words = sys.argv[1:]
    whose = resource.RUSAGE_SELF
    if what == "ask":
        import meshrun.layout  # noqa: F401 - so that the import is not timed

    began = time.perf_counter()
    if what == "ask":
        ask(words[0], int(words[1]))
    else:
        whose = resource.RUSAGE_CHILDREN
        subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "mib": resource.getrusage(whose).ru_maxrss / 1024}))


if __name__ == "__main__":
    main()
