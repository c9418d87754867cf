import sys

print("package", sys.argv[1:], __package__)
