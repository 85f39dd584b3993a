"""Hides the progress bars of transformers for loading and saving weights; download bars of the hub stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import utils as hub
from transformers.utils import logging as transformers_logging


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide "Loading weights" and "Writing model shards" inside; restores the earlier settings."""
    shown, downloads_shown = transformers_logging.is_progress_bar_enabled(), not hub.are_progress_bars_disabled()
    transformers_logging.disable_progress_bar()
    if downloads_shown:
        hub.enable_progress_bars()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
        if not downloads_shown:
            hub.disable_progress_bars()
