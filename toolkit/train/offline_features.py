"""Offline features of a run: the target's forward computes those that the rollout stage has not stored.

Shapes: L ids of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from toolkit.data.feature_store import FeatureSpec, FeatureStore, FeatureStoreError, FeatureWriter
from toolkit.log import Progress, get_logger
from toolkit.targets.features import AuxCapture, target_features
from toolkit.targets.target import Target
from toolkit.thread_limit import thread_limit
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.draft_head import plan_head
from toolkit.train.features import StoredFeatures
from toolkit.train.training_data import Data
from toolkit.train_settings import TrainSettings

if TYPE_CHECKING:  # the rollout stage imports this file for the layer ids, without accelerate
    from accelerate import Accelerator

log = get_logger(__name__)

FORWARD_TOKENS = 4096  # of one forward of the writer, padding included


def stored_layer_ids(settings: TrainSettings, target: Target) -> tuple[int, ...]:
    """The layers whose inputs are stored for a training with these settings.

    They are the layers that the head reads and, for `start` = "target", the one whose input the regression predicts.
    The last hidden state is always stored. If the head needs nothing else, the last layer's input is stored too.
    """
    config, last = plan_head(settings, target, TokenMap.identity(target.vocab_size)).config, target.n_layers
    ids = set(config.features.layer_ids(last) or ())
    if settings.start == "target" and config.regressed_layer is not None:
        ids.add(last - config.regressed_layer)
    return tuple(sorted(ids or {last - 1}))


def offline_features(
    settings: TrainSettings,
    target: Target,
    aux_layer_ids: tuple[int, ...] | None,
    data: Data,
    folder: Path,
    accelerator: Accelerator,
) -> StoredFeatures:
    """The features of all rollouts in `data`, stored in `folder`; each process computes its share of the missing ones.

    All processes must call this. Raises `FeatureStoreError` if the disk has no room, or if the stored features were
    computed with other weights.
    """
    spec = FeatureSpec.of(target, stored_layer_ids(settings, target))
    texts = texts_of(data)
    if accelerator.is_main_process:
        FeatureStore.start(folder, spec, sum(len(text) - 1 for text in texts))
    accelerator.wait_for_everyone()
    store = FeatureStore(folder, spec)
    known, missing = ([text for text in texts if (text in store) == stored] for stored in (True, False))
    log.info("features of %d of %d rollouts are in %s", len(known), len(texts), folder)
    if missing:
        store.check_room(sum(len(text) - 1 for text in missing))
    if known:
        check_stored_features(store, target, known[len(known) // 2])
    accelerator.wait_for_everyone()  # no process writes before all have checked the free space
    shares = [missing[first :: accelerator.num_processes] for first in range(accelerator.num_processes)]
    limited = thread_limit(target.device, accelerator.num_processes)
    write_features(store, target, shares[accelerator.process_index], limited)
    _keep_in_step(target, [sum(1 for _ in forwards(share)) for share in shares], accelerator.process_index)
    accelerator.wait_for_everyone()
    store.refresh()
    return StoredFeatures(store, aux_layer_ids, target.device)


@torch.no_grad()
def _keep_in_step(target: Target, counts: Sequence[int], index: int) -> None:
    """Run dummy forwards until process `index` has run as many as the process with the most: if the target is sharded,
    every forward is a collective."""
    for _ in range(max(counts) - counts[index]):
        target.body(input_ids=torch.zeros(1, 1, dtype=torch.long, device=target.device), use_cache=False)


def texts_of(data: Data) -> list[list[int]]:
    """The ids of every rollout that training or a forecast reads, each text once, sorted by length.

    Memory: some 50 bytes a token.
    """
    held_out = [
        batch.input_ids[row, start:end].tolist() for batch in data.held_out for row, start, end in batch.sequences()
    ]
    texts = {tuple(text): text for text in [example.input_ids for example in data.train] + held_out}
    return sorted(texts.values(), key=lambda text: (len(text), text))


def write_features(
    store: FeatureStore,
    target: Target,
    texts: Sequence[list[int]],
    limited: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Store the features of `texts`, which are sorted by length. limited: of `thread_limit`. Raises `FeatureStoreError`
    when the disk is full; the next call continues after the last complete shard."""
    if not texts:
        return
    capture = AuxCapture(target, store.spec.layer_ids)
    bar = Progress(sum(len(text) for text in texts), "features", "token")
    try:
        with FeatureWriter(store) as writer:
            for group in forwards(texts):
                with limited():
                    for text, features in zip(group, features_of(target, capture, group), strict=True):
                        writer.add(text, features)
                        bar.update(len(text))
    finally:
        capture.remove()
        bar.close()


def forwards(texts: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """Groups of consecutive texts with at most FORWARD_TOKENS padded tokens; a longer text is a group of its own. The
    texts are sorted by length."""
    group: list[list[int]] = []
    for text in texts:
        if group and len(text) * (len(group) + 1) > FORWARD_TOKENS:
            yield group
            group = []
        group.append(text)
    if group:
        yield group


def features_of(target: Target, capture: AuxCapture, texts: Sequence[list[int]]) -> Iterator[torch.Tensor]:
    """The features [L-1, W] of each text, from one forward over all texts (see feature_store.py)."""
    ids = torch.zeros(len(texts), max(len(text) for text in texts), dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    states = target_features(target, capture, ids)
    features = torch.cat((states.aux, states.last), dim=-1).cpu()
    for row, text in enumerate(texts):
        yield features[row, : len(text) - 1].clone()  # a copy, which does not keep the padding in memory


def check_stored_features(store: FeatureStore, target: Target, text: list[int]) -> None:
    """Compare the stored features of one text with the target's forward, to notice a target that was trained further
    under the same name and configuration. Position 0 is left out: it is an outlier in most models.

    Raises `FeatureStoreError` when the last hidden states differ by more than rounding.
    """
    capture = AuxCapture(target, store.spec.layer_ids)
    try:
        now = next(features_of(target, capture, [text]))[1:, store.last_columns].float()
    finally:
        capture.remove()
    before = store.read(text)[1:, store.last_columns].float()
    difference = float((now - before).norm() / now.norm())
    allowed = 1e-3 if store.spec.torch_dtype == torch.float32 else 1e-1
    if not difference <= allowed:
        raise FeatureStoreError(
            f"the features in {store.folder} were not computed with the current weights of {target.name}: the last "
            f"hidden states of one text differ by {difference:.2g} of their norm (allowed: {allowed:g}); move the "
            "folder away to compute the features again"
        )
