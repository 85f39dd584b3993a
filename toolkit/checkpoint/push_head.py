"""Uploads an exported head to a model hub: one repository, one commit."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import HfApi, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from toolkit.checkpoint.errors import ExportError

NAME = re.compile(r"^[\w.-]+/[\w.-]+$")


def check_push(name: str) -> None:
    """Check before anything is written that a head can be pushed as `name`. Raises `ExportError`."""
    if NAME.match(name) is None:
        raise ExportError(f"--push-to-hub {name}: ORG/NAME is needed, without a revision")
    if is_offline_mode():
        raise ExportError(
            f"--push-to-hub {name}: HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it, or leave this out"
        )


def push_head(directory: Path, name: str, *, private: bool) -> str:
    """Uploads the files of `directory` as one commit and returns its id. The repository is made where there is none.

    Raises `ExportError` when the hub refuses, or when a private head would go to a repository that is public.
    """
    api = HfApi()
    try:
        api.create_repo(name, private=private or None, exist_ok=True)
        # The hub ignores `private` for a repository that exists.
        if private and not api.repo_info(name).private:
            raise ExportError(
                f"{name} exists and is public, and --private does not make it private. Nothing was uploaded: choose "
                f"another name, or leave --private out. The export is in {directory}"
            )
        commit = api.upload_folder(repo_id=name, folder_path=directory, commit_message="Draft head exported by toolkit")
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ExportError(
            f"the hub refused {name}: {first} The export is in {directory}. A token with write access is needed: run "
            "`hf auth login`, or set HF_TOKEN"
        ) from error
    return str(commit.oid)
