"""The errors a user meets when a target cannot be had."""


class TargetError(ValueError):
    """A target that is not found, is no causal LM, or does not fit its tokenizer."""


class UnknownFamilyError(TargetError):
    """It has a config.json, of a family that transformers does not have; no repository's own code is run."""
