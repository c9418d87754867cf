"""Random numbers that nobody seeded."""

import random

import numpy

print(random.random(), numpy.random.random())
