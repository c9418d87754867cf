"""A plan in the requested format, printed or written to a file."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from msgspec.structs import replace

from meshrun.errors import UsageError
from meshrun.host.named_files import write_whole
from meshrun.host.printable import Mask
from meshrun.plan.choices import Format
from meshrun.plan.plan import LaunchPlan


def print_plan(
    plan: LaunchPlan,
    output_format: Format,
    *,
    every_row: bool = False,
    output: str | None = None,
    color_dim: str | None = None,
    rank: str | None = None,
) -> None:
    """Print what would be started, without starting it.

    Args:
        plan: What to print.
        output_format: ``text``, ``json`` or ``svg``.
        every_row: Whether text has a row per rank even if there are many.
        output: The file to write to instead of stdout.
        color_dim: The dim that colors the ranks of a picture.
        rank: The only rank to show, as a number or a coordinate.

    Raises:
        UsageError: If there is no such dim, or ``output`` cannot name a file.
        HostError: If the file cannot be written.
    """
    plan = _without_secrets(plan)
    with _stdout_to_file(output):
        if rank is not None:
            from meshrun.layout.selection import find_rank
            from meshrun.report.dry_run import print_rank, render_rank_json

            if output_format == "svg":
                raise UsageError("--rank cannot draw a picture", hint="use --format text or json")
            found = find_rank(plan.layout, rank)
            if output_format == "json":
                print(render_rank_json(plan, found))
            else:
                print_rank(plan, found)
        elif output_format == "svg":
            from meshrun.report.svg import choose_color_dim, render_svg

            dim = choose_color_dim(plan.layout, color_dim)
            print(render_svg(plan.layout, color_dim=dim), end="")
        elif output_format == "json":
            from meshrun.report.plan_json import render_plan_json

            print(render_plan_json(plan))
        else:
            from meshrun.report.dry_run import print_dry_run

            print_dry_run(plan, every_row=every_row)


def print_text(text: str, output: str | None) -> None:
    """Print a text to stdout or, if ``output`` names one, to a file.

    Raises:
        UsageError: If ``output`` cannot name a file.
        HostError: If the file cannot be written.
    """
    with _stdout_to_file(output):
        print(text, end="")


def _without_secrets(plan: LaunchPlan) -> LaunchPlan:
    mask, request = Mask(os.environ), plan.request
    program = request.program
    shown = replace(program, target=mask.text(program.target), args=mask.words(program.args))
    return replace(
        plan, request=replace(request, program=shown, sources=mask.rows(request.sources))
    )


@contextmanager
def _stdout_to_file(path: str | None) -> Iterator[None]:
    """Write what the block prints to a file if it succeeds; ``-`` is stdout."""
    if path in (None, "-"):
        yield
        return
    printed = io.StringIO()
    with redirect_stdout(printed):
        yield
    write_whole(str(path), printed.getvalue(), "--output")
