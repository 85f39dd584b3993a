"""The one error a user meets when a target cannot be had."""


class TargetError(ValueError):
    """A target that is not found, is no causal LM, or does not fit its tokenizer."""
