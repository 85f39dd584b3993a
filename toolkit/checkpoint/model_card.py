"""What the readers of an exported head get: its README.md, and the upload to a model hub."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from toolkit.checkpoint.draft_dir import DraftCheckpoint, dtype_of
from toolkit.errors import ExportError
from toolkit.targets.facts import TargetFacts
from toolkit.targets.gguf_file import DEMO_NAME

HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
COLUMNS = ("draft", "num_steps", "top_k", "num_draft_tokens", "temperature", "accept_length", "interval",
           "verify_steps", "speedup")  # fmt: skip


def model_card(draft: DraftCheckpoint, to: str, facts: TargetFacts, launch: str, notes: Sequence[str]) -> str:
    """Markdown with the header that model hubs read. `base_model` is left out for a target that is a local path."""
    header: dict[str, Any] = {"tags": ["speculative-decoding", draft.kind]}
    public = HUB_ID.match(facts.name) is not None or facts.name == DEMO_NAME
    if public:
        header["base_model"] = facts.name
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=True)}---",
        f"# {draft.kind} draft head for {facts.name if public else 'a local model'}",
        "It proposes tokens that its target accepts or replaces (speculative decoding); alone it writes nothing.",
        _what(draft, facts),
        f"## Serve it\n\n```bash\n{launch}\n```" if to != "eagle" else f"## Serve it\n\n```python\n{launch}\n```",
        _measured(draft.meta.get("measured")),
    ]
    if notes:
        parts.append("## How it was written\n\n" + "\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts) + "\n"


def head_rows(draft: DraftCheckpoint) -> list[tuple[str, str]]:
    """What a head is, in rows of (what, value), for its model card and for `toolkit inspect`."""
    config, state = draft.head.config, draft.head.state_dict()
    count = sum(value.numel() for value in state.values())
    layers = config.mtp_layers * config.layers
    own = f"{draft.token_map.size:,} of {draft.token_map.vocab_size:,} ids"
    rows = [
        ("parameters", f"{count:,} in {str(dtype_of(state)).removeprefix('torch.')}"),
        ("layer", f"width {config.hidden_size}, {config.num_attention_heads} heads, "
                  f"{config.num_key_value_heads} key-value heads of {config.head_dim}, MLP {config.intermediate_size}"
                  f"{'' if layers == 1 else f'; {layers} such layers'}"),
        ("rope", _words(config.rope_parameters)),
        ("draft vocabulary", own if config.own_vocabulary else f"{own}, with the target's output matrix"),
    ]  # fmt: skip
    if (ids := config.features.aux_layer_ids) is not None:
        rows.append(("aux_layer_ids", f"{list(ids)} (id k = input of layer k = output of layer k-1)"))
    switches = [one for one in fields(config) if isinstance(one.default, bool)]
    changed = [(one.name, getattr(config, one.name)) for one in switches if getattr(config, one.name) != one.default]
    if switches:
        on = ", ".join(name if value else f"no {name}" for name, value in changed)
        rows.append(("variants", on or f"none: {config.kind} as published"))
    return rows


def _what(draft: DraftCheckpoint, facts: TargetFacts) -> str:
    rows = [("target", f"{facts.architecture}, {facts.n_layers} layers, width {facts.hidden_size}"), *head_rows(draft)]
    if (init := draft.meta.get("init")) is not None:
        # Without a revision the name is a path of this machine.
        name = f"{init['name']}, revision {init['revision']}" if init["revision"] else "a local head"
        rows.append(("trained from", f"{name} (weights sha256 {init['weights_sha256'][:12]})"))
        lengths = " to ".join(_number(init[f"accept_length_{when}"]) for when in ("before", "after"))
        rows.append(("accept_length by that training", f"{lengths} ({init['by']})"))
    return "| | |\n| --- | --- |\n" + "\n".join(f"| {name} | {value} |" for name, value in rows)


def _measured(measured: Any) -> str:
    """The rows of measured.json, with what they were measured on."""
    rows = measured.get("rows") if isinstance(measured, dict) else None
    if not rows:
        return "## Measured\n\nNothing was measured with it before it was exported."
    where = measured.get("hardware") or {}
    settings = measured.get("settings") or {}
    lines = [
        "## Measured",
        "",
        "accept_length is tokens committed per verify step, the target's own included, with a 95 % interval; speedup "
        "is over plain decoding in the same run. Adaptive drafting has the numbers of its largest "
        "draft; its accept_length counts drafted steps alone.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
        *(f"| {' | '.join(_cell(row, name) for name in COLUMNS)} |" for row in rows),
        "",
        f"By toolkit, {measured.get('date', 'date not recorded')}, commit {measured.get('commit', 'not recorded')}; "
        f"{_words(where) or 'hardware not recorded'}; settings: {_words(settings) or 'not recorded'}.",
    ]
    return "\n".join(lines)


def _cell(row: Mapping[str, Any], name: str) -> str:
    """A cell of a row. draft: adaptive, chain or tree; of adaptive drafting the numbers are its largest tree's."""
    value = row.get("shape" if name == "draft" else name)
    if name == "draft" and "lookup" in row:
        return f"{value}, {'with' if row['lookup'] else 'no'} lookup"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_number(one) for one in value)}]"
    return _number(value)


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _words(value: Any) -> str:
    """Settings as "name value, name value"; those that are not set are left out."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_words(one)}" for key, one in value.items() if one is not None)
    if isinstance(value, list | tuple):
        return " / ".join(_words(one) for one in value)
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def check_push(name: str) -> None:
    """Check before anything is written that a head can be pushed as `name`. Raises `ExportError`."""
    if HUB_ID.match(name) is None:
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
