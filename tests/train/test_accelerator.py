"""Settings of accelerate or DeepSpeed that differ from the recipe are replaced, with a warning."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.train.accelerator import _replaced


@pytest.mark.parametrize(
    ("config", "mixed", "warnings"),
    [
        ({}, "no", []),
        ({"gradient_accumulation_steps": 1, "gradient_clipping": "auto"}, "bf16", []),
        ({"gradient_accumulation_steps": 4, "gradient_clipping": 0.5, "bf16": {"enabled": True}}, "no", []),
        (
            {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0},
            "fp16",
            [
                "mixed_precision fp16, but the recipe trains in bf16",
                "gradient_accumulation_steps 2, but the recipe's value is 4",
                "gradient_clipping 1.0, but the recipe's value is 0.5",
            ],
        ),
        (
            {"bf16": {"enabled": False}, "fp16": {"enabled": True}},
            "no",
            [
                "bf16 enabled: False, but the recipe trains in bf16",
                "fp16 enabled: True, but the recipe trains in bf16",
            ],
        ),
        ({"bf16": {"enabled": "auto"}, "fp16": {"loss_scale": 0}}, "no", []),
    ],
)
def test_replaced_settings_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], mixed: str, warnings: list[str]
) -> None:
    """The recipe has precision bf16, accumulation 4, clip 0.5. accelerate's defaults (no, 1, auto) give no warning."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", mixed)
    assert list(_replaced(config, "bf16", accumulation=4, clip=0.5)) == warnings
