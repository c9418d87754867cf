"""Print the logical CPUs this rank may use."""

import os

print(sorted(os.sched_getaffinity(0)))
