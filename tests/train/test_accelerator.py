"""The settings of accelerate and DeepSpeed: which the recipe replaces, and the bucket sizes."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.train.accelerator import BUCKET, _replaced, set_buckets


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


@pytest.mark.parametrize(
    ("sizes", "elements"),
    [
        ([40, 7], 48),  # a small head: one bucket of an even size for all of it
        ([BUCKET, BUCKET, 10], BUCKET),
        ([131_072_000, 50_331_648, 4096], 131_072_000),  # the output matrix of 32,000 tokens fits whole
    ],
)
def test_buckets_are_as_large_as_the_head_needs(sizes: list[int], elements: int) -> None:
    """DeepSpeed's default would allocate 5e8 elements for a head of 47 parameters."""
    config: dict[str, Any] = {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}
    set_buckets(config, sizes)
    assert config["zero_optimization"] == {
        "stage": 2, "reduce_bucket_size": elements, "allgather_bucket_size": elements
    }  # fmt: skip


def test_bucket_sizes_of_a_deepspeed_file_stay() -> None:
    """Somebody who tuned them for a network keeps them."""
    config = {"zero_optimization": {"reduce_bucket_size": 10, "allgather_bucket_size": 20}}
    set_buckets(config, [100])
    assert config == {"zero_optimization": {"reduce_bucket_size": 10, "allgather_bucket_size": 20}}
