"""Write to stdout and stderr, and read stdin."""

import sys

print(f"out, read {sys.stdin.read()!r}")
print("err", file=sys.stderr)
