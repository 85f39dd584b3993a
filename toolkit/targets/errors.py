"""Errors of loading a target."""


class TargetError(ValueError):
    """The target is not found, is not a supported causal LM, or does not match its tokenizer."""


class UnknownFamilyError(TargetError):
    """The target's family is not in transformers. The code of a model's repository is never run."""
