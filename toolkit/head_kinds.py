"""The registry of the kinds of draft head, which recipes and commands read without torch.

A new kind is one file in heads/, `<kind>.py`, and one line here. `heads/draft_head.py` imports its class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HeadKind:
    """head: the name of its class in heads/. settings: keys of a recipe's `train` that not every kind of head reads.
    layer_per_step: train.head.layers counts layers that draft one level each, see `HeadConfig.mtp_layers`. native:
    models ship heads of this kind in their own checkpoints. block: a block drafter, which drafts no deeper than its own
    size. vocabulary: the default of train.head.vocabulary; None: the head has an output matrix of its own.
    normalised_steps: the weights of the loss's steps sum to 1 (FastMTP)."""

    head: str
    settings: tuple[str, ...] = ()
    layer_per_step: bool = False
    native: bool = False
    vocabulary: str | None = None
    block: bool = False
    normalised_steps: bool = False


# By the name in config.json and in recipes, which is also the name of the file.
HEAD_KINDS = {
    "eagle3": HeadKind("Eagle3Head", ("head.aux_layer_ids", "head.fc_norm", "head.norm_output", "head.lm_head")),
    "eagle2": HeadKind(
        "Eagle2Head", ("unroll.token_weight", "unroll.feature_weight", "head.vocabulary"), vocabulary="target"
    ),
    "dspark": HeadKind(
        "DSparkHead",
        (
            "head.aux_layer_ids",
            "head.lm_head",
            "head.correction",
            "head.markov_rank",
            "head.mask_token_id",
            "head.causal",
        ),
        block=True,
    ),
    "mtp": HeadKind(
        "MtpHead",
        ("head.layer", "head.vocabulary"),
        layer_per_step=True,
        native=True,
        vocabulary="draft",
        normalised_steps=True,
    ),
}

# Further values of a recipe's train.head.kind: a kind with these settings of `train` where the recipe gives no others.
# JetSpec's (arXiv 2606.18394) loss is the forward KL, which has the gradient of the default loss.
HEAD_PRESETS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "jetspec": ("dspark", {"head": {"causal": True, "markov_rank": 0}, "unroll": {"step_decay": 1.0}}),
}

# Names of draft shapes. SGLang's settings for MTP modules (lmsys.org/blog/2025-07-17-mtp): 3 and 4 tokens, top-k 1.
SHAPE_PRESETS = {"mtp-3": "2,1,3", "mtp-4": "3,1,4"}
