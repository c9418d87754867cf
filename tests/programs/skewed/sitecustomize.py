"""Shift the time of day by SKEW_S seconds in a process with this folder on its path."""

import datetime
import os
import time

_SKEW_S = float(os.environ["SKEW_S"])
_now = time.time


class _Skewed(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=_SKEW_S)


_Skewed.__module__, _Skewed.__qualname__ = "datetime", "datetime"  # as pickle looks it up
datetime.datetime = _Skewed
time.time = lambda: _now() + _SKEW_S
