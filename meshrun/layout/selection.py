"""Selections of ranks: ``dp=0,tp=1-3``, ``rank=0,3`` or ``local_rank=0``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches

from meshrun.errors import SpecError, UsageError
from meshrun.layout import Layout
from meshrun.layout.spec import items_of
from meshrun.wording import count, either, listed

_RANK = "rank"
_LOCAL_RANK = "local_rank"
_INDICES = re.compile(r"([0-9]+)(?:\s*-\s*([0-9]+))?")
_LONGEST_NUMBER = 9
"""No launch has an index with more digits, and Python refuses to parse very long numbers."""


def select_ranks(layout: Layout, text: str, option: str = "") -> frozenset[int]:
    """Return the ranks that ``text`` selects, which may be none.

    A dim is given by its name, or by its index if the mesh has no names. All conditions must hold;
    several indices of one dim are alternatives. A dim named ``rank`` or ``local_rank`` hides the
    usual meaning of that word.

    Args:
        layout: The layout.
        text: Conditions such as ``dp=0,tp=0,2-3``, ``rank=0-7``, ``local_rank=0`` or ``0=1``.
        option: The option that ``text`` is the value of, for errors.

    Raises:
        SpecError: If ``text`` cannot be parsed, with the position of the first wrong character.

    Example:
        >>> from meshrun.layout.spec import parse_mesh
        >>> layout = Layout(mesh=parse_mesh("dp=2,tp=4"), nproc_per_node=(8,))
        >>> sorted(select_ranks(layout, "dp=1,tp=0,2-3"))
        [4, 6, 7]
    """
    chosen = _Parser(layout, text, option).parse()
    ranks = layout.ranks(**{dim: chosen.pop(dim) for dim in layout.shape if dim in chosen})
    if (wanted := chosen.get(_RANK)) is not None:
        ranks = [rank for rank in ranks if rank in wanted]
    if (wanted := chosen.get(_LOCAL_RANK)) is not None:
        ranks = [rank for rank in ranks if layout.local_rank(rank) in wanted]
    return frozenset(ranks)


def ranks_shown(layout: Layout, show: Sequence[str], hide: Sequence[str]) -> frozenset[int]:
    """Return the ranks that the values of ``--show`` and ``--hide`` leave.

    Raises:
        SpecError: If a value cannot be parsed.
    """
    shown = frozenset(range(layout.world_size))
    if show:
        shown = frozenset().union(*(select_ranks(layout, text, "--show") for text in show))
    return shown.difference(*(select_ranks(layout, text, "--hide") for text in hide))


def find_rank(layout: Layout, text: str, option: str = "--rank") -> int:
    """Return the only rank that ``text`` selects: a number, or conditions as for ``--show``.

    Raises:
        UsageError: If it selects no rank or several.
        SpecError: If it cannot be parsed.
    """
    if text.strip().isdecimal():
        rank = int(text) if len(text.strip()) <= _LONGEST_NUMBER else layout.world_size
        if rank >= layout.world_size:
            last = layout.world_size - 1
            raise UsageError(f"{option} {text}: ranks range from 0 to {last:,}")
        return rank
    found = sorted(select_ranks(layout, text, option))
    if len(found) != 1:
        which = f"ranks {listed(found, rest=' and more')}"
        raise UsageError(
            f"{option} {text}: expected one rank, found {which if found else 'none'}",
            hint=f"pass a rank, or an index for each dim: {option} dp=1,tp=1",
        )
    return found[0]


def find_debugged(layout: Layout, text: str | None) -> int | None:
    """Return the rank that ``--debug-rank`` selects, or ``None`` without it.

    Raises:
        UsageError: If it does not select one rank, or there are several nodes.
    """
    if text is None:
        return None
    if layout.nnodes > 1:
        raise UsageError(
            f"--debug-rank {text} works on one node only, found {layout.nnodes}",
            hint="debug a smaller mesh on one node, with --device cpu if necessary",
        )
    return find_rank(layout, text, "--debug-rank")


class _Parser:
    """A parser of one selection."""

    def __init__(self, layout: Layout, text: str, option: str) -> None:
        self._layout = layout
        self._text, self._option = text, option
        self._dims = tuple(layout.shape)
        self._counts = layout.shape
        """Number of indices of each word that may precede ``=``."""
        self._counts.setdefault(_RANK, layout.world_size)
        self._counts.setdefault(_LOCAL_RANK, max(layout.nproc_per_node))

    def parse(self) -> dict[str, set[int]]:
        """Return the indices given for each word."""
        if not self._text.strip():
            raise self._error("expected ranks, found nothing", 0, "", self._forms)
        chosen: dict[str, set[int]] = {}
        key = None
        for start, item in items_of(self._text, ","):
            at, indices = start, item
            word, equals, rest = item.partition("=")
            if equals:
                key = self._read_key(start, word.rstrip(), chosen)
                indices = rest.lstrip()
                at = start + len(item) - len(indices)
            match = _INDICES.fullmatch(indices)
            if key is None or match is None:
                raise self._not_indices(at, indices, key)
            chosen.setdefault(key, set()).update(self._read_indices(at, match, key))
        return chosen

    def _read_key(self, at: int, word: str, before: dict[str, set[int]]) -> str:
        if word in before:
            hint = f"list its indices once, such as `{word}=0,2-3`"
            raise self._error(f"`{word}` is given twice", at, word, hint)
        if word in self._counts:
            return word
        if not word:
            raise self._error("missing dim", at, word, self._forms)
        near = get_close_matches(word, self._counts, n=1, cutoff=0.5)
        nearest = f"did you mean `{near[0]}`? " if near else ""
        hint = f"{nearest}use {either([f'`{key}`' for key in self._counts])}"
        mesh = self._layout.mesh
        where = f"mesh `{mesh}` has no dim" if mesh else "there is no mesh and so no dim"
        raise self._error(f"{where} `{word}`", at, word, hint)

    def _read_indices(self, at: int, match: re.Match[str], key: str) -> range:
        first = last = self._read_index(at, match[1], key)
        if match[2] is not None:
            last = self._read_index(at + match.start(2), match[2], key)
        if last < first:
            text, hint = match[0], f"write `{last}-{first}`"
            raise self._error(f"range `{text}` is reversed", at, text, hint)
        return range(first, last + 1)

    def _read_index(self, at: int, digits: str, key: str) -> int:
        size = self._counts[key]
        index = int(digits) if len(digits) <= _LONGEST_NUMBER else size
        if index < size:
            return index
        if key in self._dims:
            message = f"dim `{key}` has no index {digits}: its size is {size}"
        elif key == _RANK:
            message = f"no rank {digits} in a world of {size}"
        else:
            message = f"no local rank {digits}: nodes have at most {count(size, 'worker')}"
        hint = f"`{key}` ranges from 0 to {size - 1}" if size > 1 else f"`{key}` is always 0"
        raise self._error(message, at, digits, hint)

    # ---- errors ----------------------------------------------------------------------------

    @property
    def _forms(self) -> str:
        """A hint with the valid forms, in terms of this mesh."""
        forms = [f"`{key}=0`" for key in self._counts]
        return f"write {either(forms)}; for several indices, `=0,2-3`"

    def _not_indices(self, at: int, item: str, key: str | None) -> SpecError:
        if not item:
            return self._error("missing index", at, item, self._forms)
        if item in self._counts and not item.isdecimal():
            return self._error(f"`{item}` has no index", at, item, f"for example: `{item}=0`")
        if _INDICES.fullmatch(item):
            items = [each for _, each in items_of(self._text, ",")]
            all_of_them = ",".join(items if all(map(_INDICES.fullmatch, items)) else [item])
            hint = f"did you mean `{_RANK}={all_of_them}`?"
            return self._error(f"`{item}` names no dim", at, item, hint)
        what = f"of `{key}`" if key is not None else "of a dim"
        message = f"`{item}` is not an index or range {what}"
        return self._error(message, at, item, self._as_pairs(item) or self._forms)

    def _as_pairs(self, item: str) -> str:
        """Return the correct form of a label copied from output, ``dp0 tp3``, or of ``dp:0``."""
        words = [re.escape(key) for key in self._counts if not key.isdecimal()]
        pair = rf"({'|'.join(sorted(words, key=len, reverse=True))})[\s:=]*({_INDICES.pattern})"
        if not re.fullmatch(rf"(?:{pair}\s*)+", item):
            return ""
        pairs = ",".join(f"{match[1]}={match[2]}" for match in re.finditer(pair, item))
        return f"write `{pairs}`"

    def _error(self, message: str, at: int, wrong: str, hint: str) -> SpecError:
        return SpecError(message, self._text, at, wrong, hint=hint, option=self._option)
