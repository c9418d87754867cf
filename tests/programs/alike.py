"""Print a line common to all ranks, one of this rank, and a common one again."""

import os

print("begin")
print("I am", os.environ["RANK"])
print("end")
