"""Print the logical CPUs that this rank may use."""

import os

print(sorted(os.sched_getaffinity(0)))
