"""Print random numbers without a seed."""

import random

import numpy

print(random.random(), numpy.random.random())
