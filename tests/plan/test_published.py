"""The model of a step against published figures: what was fitted stays fitted, what is predicted stays as close."""

from __future__ import annotations

import pytest

from toolkit.plan.published import CASES, PREDICTED_WITHIN
from toolkit.plan.step_time import Costs

# Relative errors of the predicted figures, in their order: a change of the model that moves one has to say so here.
PREDICTED = {
    81.5: 0.006,
    82.0: 0.019,
    1.142: 0.033,
    22_310: 0.015,
    17_776: 0.070,
    57_674: 0.047,
    190: 0.140,
    2.37: -0.003,
}


def test_published_figures():
    """Fitted figures are met, predicted ones are missed by what is noted above."""
    errors = {case: case.model(Costs()) / case.published - 1 for case in CASES}
    for case, error in errors.items():
        wanted = 0.0 if case.fitted else PREDICTED[int(case.published) if case.published > 100 else case.published]
        assert error == pytest.approx(wanted, abs=2e-3), case.name
    assert max(abs(error) for error in errors.values()) == pytest.approx(PREDICTED_WITHIN, abs=5e-3)
