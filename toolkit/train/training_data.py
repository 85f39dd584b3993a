"""The data of a training: examples, held-out batches for forecasts, prompts for the engine, and offline features, of
which the target's forward computes those that the rollout stage has not stored.

Shapes: L ids of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from toolkit.data.batches import Batch, BatchPlan, Example, collate, collate_rows, micro_batches
from toolkit.data.examples import Examples, load_examples
from toolkit.data.feature_store import MANIFEST, FeatureSpec, FeatureStore, FeatureWriter
from toolkit.errors import TargetError, TrainError
from toolkit.jsonl import DataError, read_rows
from toolkit.log import Progress, get_logger
from toolkit.targets.features import AuxCapture, check_packing, run_body, target_features
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.agreement import from_main, wait_for_files, wait_until
from toolkit.train.draft_head import plan_head
from toolkit.train.target_side import StoredFeatures, covered_share, plan_supervision
from toolkit.train_settings import DataSettings, TrainSettings

if TYPE_CHECKING:  # the rollout stage imports this file for the layer ids, without accelerate
    from accelerate import Accelerator


log = get_logger(__name__)

# The most held-out rollouts of a forecast; with so many its interval is narrow enough.
FORECAST_ROLLOUTS = 64

FORWARD_TOKENS = 4096  # of one forward of the writer, padding included


@dataclass(frozen=True)
class Data:
    """train: examples, which may be read from the file only when a batch needs them. plan: the batches of an epoch."""

    train: Sequence[Example]
    held_out: list[Batch]
    plan: BatchPlan
    pad_id: int


def read_data(settings: TrainSettings, rollouts: Path, target: Target, seed: int) -> Data:
    """Both splits of a rollouts file. Raises `DataError` when a split has no usable rollout."""
    held_out = list(islice(_examples(settings, rollouts, "held_out", target), FORECAST_ROLLOUTS))
    train = _train_examples(settings, rollouts, target)
    pad_id = _pad_id(target)
    held_out.sort(key=lambda example: len(example.input_ids))
    size = settings.data.micro_batch
    batches = [collate(held_out[start : start + size], pad_id) for start in range(0, len(held_out), size)]
    return Data(train=train, held_out=batches, plan=_plan(settings, train, seed), pad_id=pad_id)


class StepBatches(NamedTuple):
    """What one optimizer step of a process reads, on the host.

    micro: its micro-batches; all processes have equally many. counts [K]: supervised tokens of the global batch by step
    of the unroll. coverage: share of them that is in the draft vocabulary.
    """

    micro: list[Batch]
    counts: torch.Tensor
    coverage: float


def read_step(
    data: Data,
    shares: Sequence[Sequence[int]],
    rank: int,
    token_map: TokenMap,
    steps: int,
    size: int,
    budget: int | None,
) -> StepBatches:
    """Read the examples of a global batch from the file, each once, and collate those of process `rank`. shares: the
    indices of each process. size, budget: of `micro_batches`. In place of a micro-batch without rows there is a
    sequence without a loss."""
    read = [[data.train[index] for index in share] for share in shares]
    everyone = [example for share in read for example in share]
    whole = collate(everyone, data.pad_id)
    idle = collate(everyone[:1], data.pad_id)
    idle = replace(idle, response=torch.zeros_like(idle.response))
    micro = [collate_rows(rows, data.pad_id) if rows else idle for rows in micro_batches(read, rank, size, budget)]
    counts = plan_supervision(whole.response, steps, whole.starts).counts
    return StepBatches(micro, counts, covered_share(whole, token_map))


def with_packing(settings: TrainSettings, target: Target) -> DataSettings:
    """The data settings with a decided `pack`: on a GPU rows are packed, if the target keeps the texts of a row apart.

    Not by default where anchors are drawn, so many a row. Raises `TargetError` where packing is asked for and the
    target does not."""
    data, anchors = settings.data, settings.unroll.anchors is not None
    alone = data.global_batch == 1 or data.split_rows > 1 or anchors
    pack = target.device.type != "cpu" and not alone if data.pack is None else data.pack
    if pack:
        try:
            check_packing(target)
        except TargetError as error:
            if data.pack:
                raise
            log.info("rows are not packed: %s", error)
            pack = False
    return replace(data, pack=pack)


def with_fresh(data: Data, settings: TrainSettings, rollouts: Path, target: Target, seed: int) -> Data:
    """The same held-out batches with the train split of another rollouts file."""
    train = _train_examples(settings, rollouts, target)
    return replace(data, train=train, plan=_plan(settings, train, seed))


class WholeTexts(Sequence[Example]):
    """Examples all of whose ids are supervised. No id counts as greedy: those of prompts are not the target's."""

    def __init__(self, examples: Examples) -> None:
        self.examples, self.lengths = examples, examples.lengths

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]  # no slices
        example = self.examples[index]
        return replace(example, response=[True] * len(example.input_ids), greedy=False)


def _train_examples(settings: TrainSettings, rollouts: Path, target: Target) -> Examples | WholeTexts:
    examples = _examples(settings, rollouts, "train", target)
    return WholeTexts(examples) if settings.data.supervise == "all" else examples


def _plan(settings: TrainSettings, train: Examples | WholeTexts, seed: int) -> BatchPlan:
    return BatchPlan(train.lengths, settings.data.global_batch, seed)


def _examples(settings: TrainSettings, rollouts: Path, split: str, target: Target) -> Examples:
    """One split; examples are cut to train.data.max_length and to the target's context."""
    limit = min(settings.data.max_length, target.max_context)
    # Rollouts do not record the quantization of their target.
    known = target.name if target.quantization is None else None

    def check(example: Example) -> None:
        if not 0 <= min(example.input_ids) <= max(example.input_ids) < target.vocab_size:
            raise DataError(
                f"{rollouts}: rollout {example.id} has ids from {min(example.input_ids)} to {max(example.input_ids)}, "
                f"but the target {target.name} has ids 0 to {target.vocab_size - 1}: it was written with another "
                "tokenizer; write the rollouts again with this target"
            )

    return load_examples(rollouts, split, limit, known, check)[0]


def _pad_id(target: Target) -> int:
    """The id of padding. It must have an embedding row, and some tokenizers pad with an id that has none."""
    given = target.tokenizer.pad_token_id
    if given is not None and given < target.vocab_size:
        return given
    return next(iter(sorted(target.stop_ids)), 0)


class HeldOutPrompt(NamedTuple):
    """The ids before the last answer of a held-out rollout."""

    id: str
    prompt: list[int]


def read_held_out(rollouts: Path, count: int, longest: int) -> list[HeldOutPrompt]:
    """The first `count` held-out rollouts in the order of their ids, without prompts of more than `longest` ids.

    Memory: these rollouts only. Raises `TrainError` when no prompt is left.
    """
    rows = unusable = 0

    def usable() -> Iterator[dict[str, Any]]:
        nonlocal rows, unusable
        for _, row in read_rows(rollouts):
            if row.get("split") != "held_out":
                continue
            rows += 1
            if row["response_spans"] and 0 < row["response_spans"][-1][0] <= longest:
                yield row
            else:
                unusable += 1

    first = nsmallest(count, usable(), key=lambda row: str(row["id"]))
    if unusable:
        log.warning(
            "%d of %d held-out rollouts are not used in measurements: they have no prompt, or one of more than %d ids",
            unusable,
            rows,
            longest,
        )
    if not first:
        raise TrainError(
            f"{rollouts} has no usable held-out prompt ({rows} held-out rows; a prompt needs 1 to {longest} ids); "
            "raise rollouts.held_out, or switch the engine's measurements off with train.evaluation.real_every=null"
        )
    return [HeldOutPrompt(str(row["id"]), row["input_ids"][: row["response_spans"][-1][0]]) for row in first]


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
    limited: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> StoredFeatures:
    """The features of all rollouts in `data`, stored in `folder`; each process computes its share of the missing ones.

    All processes must call this. limited: of `thread_limit`. Raises `FeatureStoreError` if the disk has no room.
    """
    spec = FeatureSpec.of(target, stored_layer_ids(settings, target))
    texts = texts_of(data)

    def start() -> list[int]:
        """Of the texts, those without features."""
        store = FeatureStore.start(folder, spec, sum(len(text) - 1 for text in texts))
        absent = [index for index, text in enumerate(texts) if text not in store]
        if absent:
            store.check_room(sum(len(texts[index]) - 1 for index in absent))
        return absent

    missing = [texts[index] for index in from_main(accelerator, start)]
    wait_for_files(folder / MANIFEST)
    store = FeatureStore(folder, spec)
    log.info("features of %d of %d rollouts are in %s", len(texts) - len(missing), len(texts), folder)
    shares = [missing[first :: accelerator.num_processes] for first in range(accelerator.num_processes)]
    write_features(store, target, shares[accelerator.process_index], limited)
    _keep_in_step(target, [sum(1 for _ in forwards(share)) for share in shares], accelerator.process_index)
    accelerator.wait_for_everyone()
    wait_until(lambda: _unseen(store, texts))
    return StoredFeatures(store, aux_layer_ids, target.device)


def _unseen(store: FeatureStore, texts: Sequence[list[int]]) -> list[str]:
    """What the store still lacks, if anything, for the message of `wait_until`."""
    store.refresh()
    lacking = sum(text not in store for text in texts)
    return [f"the features of {lacking} texts in {store.folder}"] if lacking else []


def _keep_in_step(target: Target, counts: Sequence[int], index: int) -> None:
    """Run dummy forwards until process `index` has run as many as the process with the most: if the target is sharded,
    every forward is a collective."""
    for _ in range(max(counts) - counts[index]):
        run_body(target, torch.zeros(1, 1, dtype=torch.long))


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
