"""Print random numbers without a seed, and a new folder for temporary files."""

import os
import random
import sys
import tempfile

import numpy

os.makedirs(sys.argv[1], exist_ok=True)
os.environ["TMPDIR"] = sys.argv[1]
print(random.random(), numpy.random.random(), tempfile.gettempdir())
