"""Print a line that all ranks print, one of the own, and one of all again."""

import os

print("begin")
print("I am", os.environ["RANK"])
print("end")
