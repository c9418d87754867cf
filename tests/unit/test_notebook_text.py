"""What ``%mesh`` prints."""

from types import SimpleNamespace

import pytest

from meshrun.api.notebook import _Cells


@pytest.mark.parametrize(
    ("labels", "shown"), [(["dp0"], "dp=x: 1 rank\n"), (["dp0", "dp1"], "dp=x: 2 ranks\n")]
)
def test_ranks_are_counted(
    labels: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = _Cells(None)
    cells._group = SimpleNamespace(is_open=True, labels=labels)  # type: ignore[assignment]
    cells._words = ["dp=x"]
    cells.show("")

    assert capsys.readouterr().out == shown
