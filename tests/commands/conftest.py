"""A draft directory on disk, as `toolkit run` leaves one."""

from __future__ import annotations

import pytest

from toolkit.checkpoint.draft_dir import save_draft


@pytest.fixture(scope="session")
def tiny_draft_directory(tiny_target, tiny_draft, tiny_target_directory, tmp_path_factory):
    """The tiny draft; it names the tiny target's directory as its target."""
    meta = {"target": {"name": str(tiny_target_directory), "revision": None}}
    directory = tmp_path_factory.mktemp("tiny-draft")
    return save_draft(directory, tiny_draft.head.state_dict(), tiny_draft.head.config, tiny_draft.token_map, meta)
