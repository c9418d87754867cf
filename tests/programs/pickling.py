"""Classes of __main__ survive pickling, and inspect finds their source."""

import inspect
import pickle


class Point:
    x = 1


copy = pickle.loads(pickle.dumps(Point()))
print(copy.x, inspect.getsource(Point).splitlines()[0])
