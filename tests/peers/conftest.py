"""What the judges said, as one record: TOOLKIT_JUDGES_RECORD names the file, else nothing is written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from toolkit.bench.records import make_record, write_record

COMMAND = "TOOLKIT_VLLM_PYTHON=PYTHON TOOLKIT_PEERS_DRAFT=DIR TOOLKIT_JUDGES_RECORD=FILE pytest -m peers"


@pytest.fixture(scope="session")
def verdicts() -> Iterator[list[dict[str, Any]]]:
    """Rows with `judge`, `head` and what was compared; a test adds its own before it asserts."""
    rows: list[dict[str, Any]] = []
    yield rows
    if rows and os.environ.get("TOOLKIT_JUDGES_RECORD"):
        write_record(os.environ["TOOLKIT_JUDGES_RECORD"], make_record("judges", COMMAND, {}, rows))
