"""The style of an SVG: colors, strokes and fonts, and its basic elements. Pure.

Plain class rules, no ``var()``: many converters from SVG to PNG or PDF lack CSS variables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

CATEGORIES = (
    "#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#0072b2", "#f0e442", "#d55e00", "#cccccc",
)  # fmt: skip
"""Okabe and Ito's colors, distinct for any color vision, with light gray instead of black, so that
it also stands out on a dark page."""
RAMP_STEPS = 64
_RAMP = (
    "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6dcd59", "#b4de2c", "#fde725",
)  # fmt: skip
"""viridis without its darkest end, which would vanish on a dark page."""
PLAIN = "plain"
"""Class of a cell without a color."""

_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NARROW = frozenset(" .,:;!|'iljtfrI()[]-")
_WIDE = frozenset("mwMW@%")

_SHARED = """\
.meshrun{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",Arial,sans-serif}
.meshrun text{font-size:12px}
.meshrun .head{font-size:16px;font-weight:600}
.meshrun .soft{font-size:11px}
.meshrun .cell text{font-size:13px;text-anchor:middle}
.meshrun .cell .at{font-size:9px}
.meshrun .small .cell text{font-size:9px}
.meshrun .marks .over{stroke-dasharray:3 2}
.meshrun .cell rect{stroke-opacity:.4;stroke-width:.75}
.meshrun .plain rect{fill-opacity:.12}
.meshrun .box{fill-opacity:.06;stroke-opacity:.55}
.meshrun .frame{fill:none;stroke-opacity:.8;stroke-width:1.5}
.meshrun .guide{stroke-opacity:.3;stroke-width:.75}
.meshrun .in,.meshrun .over{fill:none;stroke-width:2}
.meshrun .over{stroke-dasharray:5 3}
.meshrun .marks .second.over{stroke-dasharray:9 2}
.meshrun .marks .third.over{stroke-dasharray:1.5 1.5}
.meshrun .third.in{stroke-width:3}
"""
_INKED = """\
.meshrun .page{{fill:{page}}}
.meshrun text{{fill:{ink}}}
.meshrun .soft{{fill:{soft}}}
.meshrun .box{{fill:{soft};stroke:{soft}}}
.meshrun .frame{{stroke:{soft}}}
.meshrun .guide{{stroke:{soft}}}
.meshrun .cell rect{{stroke:{ink}}}
.meshrun .plain rect{{fill:{ink}}}
.meshrun .in{{stroke:{ink}}}
.meshrun .second.in{{stroke:{cool}}}
.meshrun .third.in{{stroke:{deep}}}
.meshrun .over{{stroke:{warm}}}
.meshrun .in circle,.meshrun .dot{{fill:{ink};stroke:none}}
.meshrun .over circle{{fill:{warm};stroke:none}}
"""
_LIGHT = {
    "page": "#ffffff", "ink": "#1f2328", "soft": "#59636e",
    "warm": "#c2410c", "cool": "#0550ae", "deep": "#8250df",
}  # fmt: skip
_DARK = {
    "page": "#0d1117", "ink": "#e6edf3", "soft": "#9aa4af",
    "warm": "#ff9a57", "cool": "#79c0ff", "deep": "#d2a8ff",
}  # fmt: skip
_SIZES = {"head": 16 * 1.12, "soft": 11.0, "": 12.0}
"""Font sizes of the classes of texts; bold letters are wider."""
DARK_QUERY = "@media (prefers-color-scheme:dark)"


def color_class(index: int, size: int) -> str:
    """Return the class of an index of a dim; a class has the same color in every picture."""
    if size <= len(CATEGORIES):
        return f"c{index}"
    return f"r{round(index * (RAMP_STEPS - 1) / (size - 1))}"


def color(name: str) -> str:
    """Return the fill of a class that :func:`color_class` made, as ``#rrggbb``."""
    number = int(name[1:])
    if name[0] == "c":
        return CATEGORIES[number]
    place = number * (len(_RAMP) - 1) / (RAMP_STEPS - 1)
    before = min(int(place), len(_RAMP) - 2)
    part = place - before
    low, high = (bytes.fromhex(_RAMP[at][1:]) for at in (before, before + 1))
    mixed = (round(one + (other - one) * part) for one, other in zip(low, high, strict=True))
    return f"#{bytes(mixed).hex()}"


def text_color(fill: str) -> str:
    """Return black or white, whichever reads better on ``fill``, by its luma (ITU-R BT.601)."""
    red, green, blue = bytes.fromhex(fill[1:])
    return "#000" if 0.299 * red + 0.587 * green + 0.114 * blue > 103 else "#fff"


def style_sheet(color_classes: Iterable[str]) -> str:
    """Return the ``<style>`` element, with a rule for each of these classes of cells."""
    fills = ""
    for name in sorted(set(color_classes) - {PLAIN}, key=lambda name: (name[0], int(name[1:]))):
        fill = color(name)
        fills += f".meshrun .{name} rect{{fill:{fill}}}\n"
        fills += f".meshrun .{name} text{{fill:{text_color(fill)}}}\n"
    # The fills come last, as they are the same in light and dark.
    dark = _INKED.format(**_DARK)
    rules = f"{_SHARED}{_INKED.format(**_LIGHT)}{DARK_QUERY}{{\n{dark}}}\n{fills}"
    return f"<style>\n{rules}</style>"


# ---- elements ------------------------------------------------------------------------------


def number(value: float) -> str:
    """Return a length with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def width_of(text: str, size: float) -> float:
    """Return an upper estimate of the width of ``text`` at a font size."""
    # In hundredths of an em of DejaVu Sans, the widest of the usual fonts. Integers, because
    # Python 3.12 sums floats differently than earlier versions.
    parts = (40 if c in _NARROW else 100 if c in _WIDE or c > "\u02ff" else 65 for c in text)
    return size * sum(parts) / 100


def shorten_label(text: str) -> str:
    """Return ``text``, truncated to 24 characters."""
    return text if len(text) <= 24 else text[:23] + "…"


def words(text: str) -> str:
    """Return ``text`` escaped for XML."""
    return escape(_NOT_IN_XML.sub("\ufffd", text))


def text(x: float, y: float, content: str, name: str = "") -> str:
    """Return a ``<text>`` that starts at ``x``, with its baseline at ``y``."""
    styled = f' class="{name}"' if name else ""
    return f'<text{styled} x="{number(x)}" y="{number(y)}">{words(content)}</text>'


class Drawing:
    """The elements of an SVG, and how far to the right they reach."""

    def __init__(self) -> None:
        self.elements: list[str] = []
        self.right = 0.0

    def add(self, *elements: str) -> None:
        """Add elements that reach no farther than others."""
        self.elements += elements

    def text(self, x: float, y: float, content: str, name: str = "") -> float:
        """Add a text as :func:`text` returns it; return its right edge."""
        self.add(text(x, y, content, name))
        edge = x + width_of(content, _SIZES[name])
        self.right = max(self.right, edge)
        return edge


def rect(x: float, y: float, width: float, height: float, extra: str = "") -> str:
    """Return a ``<rect>``."""
    size = f'width="{number(width)}" height="{number(height)}"'
    return f'<rect{extra} x="{number(x)}" y="{number(y)}" {size}/>'


def corners(x: float, y: float, width: float, height: float) -> str:
    """Return a ``<path>`` of the corners of a rectangle, with arms a third of its shorter side."""
    arm = min(width, height) / 3
    right, low = x + width, y + height
    ends = ((x, y, 1, 1), (right, y, -1, 1), (right, low, -1, -1), (x, low, 1, -1))
    path = "".join(
        f"M{number(at)} {number(level + down * arm)}V{number(level)}H{number(at + across * arm)}"
        for at, level, across, down in ends
    )
    return f'<path d="{path}"/>'


def line(x1: float, y1: float, x2: float, y2: float, name: str = "") -> str:
    """Return a ``<path>`` from one point to another."""
    styled = f' class="{name}"' if name else ""
    return f'<path{styled} d="M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}"/>'


def dot(x: float, y: float) -> str:
    """Return a ``<circle>``."""
    return f'<circle cx="{number(x)}" cy="{number(y)}" r="3"/>'
