"""Progress on stderr: what an earlier session did counts for no speed."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.log import Progress
from toolkit.pipeline import stages as module


def test_resumed_work_is_shown_but_not_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the 500 old lines counted as this second's work, the estimate would promise seconds for minutes."""
    bars: list[Progress] = []

    def remembered(*arguments: Any) -> Progress:
        bars.append(Progress(*arguments))
        return bars[-1]

    monkeypatch.setattr(module, "Progress", remembered)
    with module.progress_bar("rollouts", "conversation", 640, "tokens") as show:
        show(501, 640, 12)
        show(502, 640, 3400)
        assert bars[0].initial == 500
    assert capsys.readouterr().err.startswith("rollouts: 502/640 conversations, 00:00 min, ")
