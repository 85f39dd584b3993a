"""transformers' bars for what takes a second, kept off the terminal; the hub's bars for downloads stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import utils as hub
from transformers.utils import logging as transformers_logging


@contextmanager
def without_bars() -> Iterator[None]:
    """No "Loading weights" and no "Writing model shards" inside; afterwards all is as it was."""
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
