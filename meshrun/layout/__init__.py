"""The place of every rank, by arithmetic alone: no torch, no process, no environment.

``layout`` is the public interface and combines the others: ``axes`` is the arithmetic of dims and
slots, ``derived`` defines dims made from others, ``domains`` says which nodes share NVLink,
``placing`` assigns ranks to slots, and ``solving`` infers sizes.
"""

from __future__ import annotations

from meshrun.layout.coordinate import Coordinate as Coordinate
from meshrun.layout.derived import Flatten as Flatten
from meshrun.layout.derived import View as View
from meshrun.layout.derived import format_derived as format_derived
from meshrun.layout.derived import parse_derived as parse_derived
from meshrun.layout.layout import Layout as Layout
from meshrun.layout.layout import solve_layout as solve_layout
from meshrun.layout.solving import MAX_RANKS as MAX_RANKS
from meshrun.layout.solving import count_slots as count_slots
