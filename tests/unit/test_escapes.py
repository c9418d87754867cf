"""Lines that change at the bottom of a terminal."""

import pytest

from meshrun.console.escapes import fit

GREEN, RESET = "\x1b[32m", "\x1b[0m"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("short", "short"),
        ("x" * 20, "x" * 9),
        (f"{GREEN}short{RESET}", f"{GREEN}short{RESET}"),
        (f"{GREEN}{'x' * 20}{RESET}", f"{GREEN}{'x' * 9}{RESET}"),
        (f"{'x' * 20}{GREEN}y{RESET}", f"{'x' * 9}{GREEN}{RESET}"),
        ("训练" * 5, "训练训练"),
        ("e\u0301" * 20, "e\u0301" * 9),
    ],
)
def test_a_changing_line_is_cut_to_the_window(text: str, shown: str) -> None:
    """Colors take no columns, wherever they are, and are reset after the cut."""
    assert fit(text.encode(), 10) == shown.encode()
