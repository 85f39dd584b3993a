"""What a configuration of accelerate or DeepSpeed says beside the recipe is said to be replaced."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.train.accelerator import _replaced


@pytest.mark.parametrize(
    ("config", "mixed", "said"),
    [
        ({}, "no", []),
        ({"gradient_accumulation_steps": 1, "gradient_clipping": "auto"}, "bf16", []),
        ({"gradient_accumulation_steps": 4, "gradient_clipping": 0.5, "bf16": {"enabled": True}}, "no", []),
        (
            {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0},
            "fp16",
            [
                "mixed_precision fp16, and the recipe trains in bf16",
                "gradient_accumulation_steps 2, and the recipe's is 4",
                "gradient_clipping 1.0, and the recipe's is 0.5",
            ],
        ),
        (
            {"bf16": {"enabled": False}, "fp16": {"enabled": True}},
            "no",
            [
                "bf16 enabled: False, and the recipe trains in bf16",
                "fp16 enabled: True, and the recipe trains in bf16",
            ],
        ),
        ({"bf16": {"enabled": "auto"}, "fp16": {"loss_scale": 0}}, "no", []),
    ],
)
def test_what_is_replaced(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], mixed: str, said: list[str]) -> None:
    """Precision bf16, accumulation 4, clip 0.5. accelerate's own fillings (no, 1, auto) are nobody's wish."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", mixed)
    assert list(_replaced(config, "bf16", accumulation=4, clip=0.5)) == said
