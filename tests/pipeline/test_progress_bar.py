"""Progress on stderr: what an earlier session did counts for no speed."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.log import progress
from toolkit.pipeline import progress_bar as module


def test_resumed_work_is_shown_but_not_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the 500 old lines counted as this second's work, the estimate would promise seconds for minutes."""
    bars: list[Any] = []

    def remembered(*arguments: Any) -> Any:
        bars.append(progress(*arguments))
        return bars[-1]

    monkeypatch.setattr(module, "progress", remembered)
    with module.progress_bar("rollouts", "conversation", 640, "tokens") as show:
        show(501, 640, 12)
        show(502, 640, 34)
    assert (bars[0].n, bars[0].initial, bars[0].total) == (502, 500, 640)
    error = capsys.readouterr().err
    assert "rollouts" in error and "502/640" in error and "34 tokens" in error
