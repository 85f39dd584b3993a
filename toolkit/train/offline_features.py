"""Offline features of a run: what the rollout stage did not leave on disk is made by the target's forward.

Shapes: L ids of a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from toolkit.data.feature_store import FeatureSpec, FeatureStore, FeatureStoreError, FeatureWriter
from toolkit.log import get_logger, progress
from toolkit.targets.features import AuxCapture, target_features
from toolkit.targets.load import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.draft_head import plan_head
from toolkit.train.features import StoredFeatures
from toolkit.train.split_data import Data
from toolkit.train_settings import TrainSettings

if TYPE_CHECKING:  # the rollout stage asks for layer ids only
    from accelerate import Accelerator

log = get_logger(__name__)

FORWARD_TOKENS = 4096  # padded, of one forward of the writer


def stored_layer_ids(settings: TrainSettings, target: Target) -> tuple[int, ...]:
    """The layers whose inputs are stored for a training of these settings: those that the head reads, and for a start
    from the target the one whose input is regressed. The last hidden state is always stored; where it is all that the
    head needs, the last layer's input is stored beside it."""
    config, last = plan_head(settings, target, TokenMap.identity(target.vocab_size)).config, target.n_layers
    ids = set(config.features.layer_ids(last) or ())
    if settings.head.init == "target" and config.regressed_layer is not None:
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
    """The features of all rollouts in `data`, in `folder`; each process makes its share of the missing ones.

    All processes must call this. Raises `FeatureStoreError`: no room, or features of other weights than the target's.
    """
    spec = FeatureSpec.of(target, stored_layer_ids(settings, target))
    texts = texts_of(data)
    if accelerator.is_main_process:
        FeatureStore.start(folder, spec, sum(len(text) - 1 for text in texts))
    accelerator.wait_for_everyone()
    store = FeatureStore(folder, spec)
    known, missing = ([text for text in texts if (text in store) == there] for there in (True, False))
    log.info("features of %d of %d rollouts are in %s", len(known), len(texts), folder)
    if missing:
        store.check_room(sum(len(text) - 1 for text in missing))
    if known:
        check_agreement(store, target, known[len(known) // 2])
    accelerator.wait_for_everyone()  # nobody writes before all have seen that there is room
    shares = [missing[first :: accelerator.num_processes] for first in range(accelerator.num_processes)]
    write_features(store, target, shares[accelerator.process_index])
    _keep_in_step(target, [sum(1 for _ in forwards(share)) for share in shares], accelerator.process_index)
    accelerator.wait_for_everyone()
    store.refresh()
    return StoredFeatures(store, aux_layer_ids, target.device)


@torch.no_grad()
def _keep_in_step(target: Target, counts: Sequence[int], index: int) -> None:
    """Forwards of nothing until process `index` has run as many as the one that had most: where the layers are shared
    out, each is the work of all."""
    for _ in range(max(counts) - counts[index]):
        target.body(input_ids=torch.zeros(1, 1, dtype=torch.long, device=target.device), use_cache=False)


def texts_of(data: Data) -> list[list[int]]:
    """The ids of every rollout that training or a forecast reads, each text once, by length.

    Memory: some 50 bytes a token, where the features of one take thousands on the disk.
    """
    held_out = [
        batch.input_ids[row, start:end].tolist() for batch in data.held_out for row, start, end in batch.sequences()
    ]
    texts = {tuple(text): text for text in [example.input_ids for example in data.train] + held_out}
    return sorted(texts.values(), key=lambda text: (len(text), text))


def write_features(store: FeatureStore, target: Target, texts: Sequence[list[int]]) -> None:
    """Store the features of `texts`, which come by length. Raises `FeatureStoreError` when the disk fills up; started
    again, it goes on behind the last whole shard."""
    if not texts:
        return
    capture = AuxCapture(target, store.spec.layer_ids)
    bar = progress(sum(len(text) for text in texts), "features", "token")
    try:
        with FeatureWriter(store) as writer:
            for group in forwards(texts):
                for text, features in zip(group, features_of(target, capture, group), strict=True):
                    writer.add(text, features)
                    bar.update(len(text))
    finally:
        capture.remove()
        bar.close()


def forwards(texts: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """Neighbours in groups of at most FORWARD_TOKENS padded tokens; a longer text stands alone. They come by length."""
    group: list[list[int]] = []
    for text in texts:
        if group and len(text) * (len(group) + 1) > FORWARD_TOKENS:
            yield group
            group = []
        group.append(text)
    if group:
        yield group


def features_of(target: Target, capture: AuxCapture, texts: Sequence[list[int]]) -> Iterator[torch.Tensor]:
    """[L-1, W] of each text, by one forward over all of them (see feature_store.py)."""
    ids = torch.zeros(len(texts), max(len(text) for text in texts), dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    found = target_features(target, capture, ids)
    features = torch.cat((found.aux, found.last), dim=-1).cpu()
    for row, text in enumerate(texts):
        yield features[row, : len(text) - 1].clone()  # the padding does not wait for its shard with it


def check_agreement(store: FeatureStore, target: Target, text: list[int]) -> None:
    """Compare what is stored of one text with the target's forward: trained further, under the same name and
    configuration, it is another target. Position 0 is left out, an outlier in most models.

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
            f"the features in {store.folder} are not those of {target.name} as it is now: one text's last hidden "
            f"states differ by {difference:.2g} of their size (allowed: {allowed:g}); delete the folder to make them "
            "anew"
        )
