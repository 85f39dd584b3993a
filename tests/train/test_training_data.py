"""Rollouts that a training cannot take as they are, and features from disk, which train as a forward's do."""

from __future__ import annotations

import dataclasses
import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from toolkit.data import feature_store
from toolkit.data.batches import BatchPlan, Example, collate
from toolkit.data.feature_store import FeatureStoreError
from toolkit.errors import TargetError
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.heads.head_config import default_aux_layer_ids
from toolkit.jsonl import DataError
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train import training_data as offline
from toolkit.train.step import TrainedHead, forecast_accept_length, micro_step, supervised_counts
from toolkit.train.target_side import TargetSide
from toolkit.train.training_data import Data, read_data, read_step, with_packing
from toolkit.train.warm_start import initialise_from_target, initialise_random
from toolkit.train_settings import DataSettings, HeadSettings, TrainSettings

SETTINGS = TrainSettings(data=DataSettings(max_length=5000, global_batch=1))


def _write(path, *texts: list[int]) -> None:
    with path.open("w") as handle:
        for at, ids in enumerate(texts):
            row = {"id": str(at), "split": "train" if at else "held_out", "input_ids": ids}
            handle.write(json.dumps({**row, "response_spans": [[1, len(ids)]]}) + "\n")


def test_an_answer_longer_than_the_context(tiny_target, tmp_path, monkeypatch, caplog):
    """The target was not trained on positions past its context: features there are useless, or indexing fails."""
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    caplog.set_level("INFO")
    path = tmp_path / "rollouts.jsonl"
    _write(path, [5] * 9, [5] * (tiny_target.max_context + 7), [6] * 9)
    data = read_data(SETTINGS, path, tiny_target, seed=0)
    assert sorted(len(one.input_ids) for one in data.train) == [9, tiny_target.max_context]
    assert f"1 train rollouts are longer than {tiny_target.max_context} ids" in caplog.text


def test_prompts_are_supervised_where_asked(tiny_target, tmp_path):
    """Held-out rollouts are judged by their answers under either setting, or forecasts would not be comparable."""
    path = tmp_path / "rollouts.jsonl"
    with path.open("w") as handle:
        for at, split in enumerate(("held_out", "train")):
            row = {"id": str(at), "split": split, "input_ids": [5, 6, 7, 8, 9, 10], "response_spans": [[3, 5]]}
            handle.write(json.dumps(row) + "\n")

    def supervised(choice):
        settings = replace(SETTINGS, data=replace(SETTINGS.data, supervise=choice))
        data = read_data(settings, path, tiny_target, seed=0)
        return data.train[0].response, data.train[0].greedy, data.held_out[0].response.tolist()

    answer = [False, False, False, True, True, False]
    assert supervised("answers") == (answer, False, [answer])
    assert supervised("all") == ([True] * 6, False, [answer])


def test_ids_the_target_has_no_rows_for(tiny_target, tmp_path):
    """Rollouts of another tokenizer: the embedding would fail deep in a forward, on a GPU with no message at all."""
    path = tmp_path / "rollouts.jsonl"
    _write(path, [5] * 9, [5, 6, tiny_target.vocab_size, 7])
    with pytest.raises(DataError, match=rf"rollout 1 has ids from 5 to {tiny_target.vocab_size}.*another tokenizer"):
        read_data(SETTINGS, path, tiny_target, seed=0)


def test_a_step_s_batches(tiny_target, tmp_path):
    """Both processes count the whole batch, and the one without a sequence runs a forward without a loss."""
    path = tmp_path / "rollouts.jsonl"
    _write(path, [5] * 9, [6] * 9, [7] * 5)
    data = read_data(SETTINGS, path, tiny_target, seed=0)
    full, idle = (read_step(data, [[1, 0], []], rank, TokenMap.from_ids([7], 393), 2, 1, None) for rank in (0, 1))
    assert [len(one.micro) for one in (full, idle)] == [2, 2]
    assert full.counts.tolist() == idle.counts.tolist() == [7 + 3, 6 + 2]
    assert full.coverage == idle.coverage == pytest.approx(3 / 10)
    assert full.micro[0].input_ids.tolist() == idle.micro[0].input_ids.tolist() == [[7] * 5]
    assert full.micro[0].response.any() and not idle.micro[0].response.any()


def test_rows_are_packed_by_default_on_a_gpu(tiny_target, monkeypatch):
    """If the target keeps texts apart; who asks for it where it does not is told."""

    def refuse(target):
        raise TargetError("attend to each other")

    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(offline, "check_packing", lambda target: None)
    assert [with_packing(TrainSettings(), one).pack for one in (on_gpu, tiny_target)] == [True, False]
    monkeypatch.setattr(offline, "check_packing", refuse)
    assert not with_packing(TrainSettings(), on_gpu).pack
    with pytest.raises(TargetError, match="each other"):
        with_packing(TrainSettings(data=DataSettings(pack=True)), tiny_target)


K = 4
ALONE = SimpleNamespace(is_main_process=True, process_index=0, num_processes=1, wait_for_everyone=lambda: None)


@pytest.fixture
def data(tiny_target) -> Data:
    """Rollouts of random tokens and many lengths; two answers end where the text goes on, two texts are the same."""
    generator = torch.Generator().manual_seed(5)
    examples = []
    for index in range(16):
        prompt, answer = torch.randint(3, 30, (2,), generator=generator).tolist()
        ids = torch.randint(3, tiny_target.vocab_size, (prompt + answer + 2,), generator=generator).tolist()
        examples.append(Example(str(index), ids, [False] * prompt + [True] * answer + [index > 1] * 2))
    train = [*examples[:12], Example("twin", examples[0].input_ids, examples[0].response)]
    plan = BatchPlan([len(example.input_ids) for example in train], 4, 0)
    return Data(train=train, held_out=[collate(examples[12:], pad_id=7)], plan=plan, pad_id=7)


@pytest.fixture
def opened(tiny_target, data, tmp_path):
    """The stored features of `data`, made by the target now."""

    def call(layers=1):
        ids, settings = default_aux_layer_ids(tiny_target.n_layers), TrainSettings(head=HeadSettings(layers=layers))
        return offline.offline_features(settings, tiny_target, ids, data, tmp_path / "features", ALONE)

    return call


def train(side: TargetSide, data: Data) -> tuple[list[list[float]], float]:
    config = Eagle3Config.from_target_config(
        side.target.config,
        vocab_size=side.target.vocab_size,
        draft_vocab_size=side.token_map.size,
        aux_layer_ids=side.capture.aux_layer_ids,
    )
    head = Eagle3Head(config)
    initialise_random(head, seed=0)
    model = TrainedHead(head, 0.8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    for _, _, indices in (next(batches) for batches in [data.plan.from_position()] for _ in range(30)):
        batch = collate([data.train[index] for index in indices], data.pad_id)
        counts = supervised_counts(batch, K).clamp(min=1)
        loss, by_step, *_ = micro_step(model, side, batch, counts, K)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(by_step.tolist())
    return losses, forecast_accept_length(model, side, data.held_out, K).accept_length


def test_the_curve_is_that_of_online_features(tiny_target, tiny_draft, data, opened):
    """fp32, 30 steps, every step's losses to 1e-4: the writer's forward has other batches, so only roundings differ.
    What is not stored (each text's last position, the padding) must reach no loss, and the target's body not run."""
    ids, source = default_aux_layer_ids(tiny_target.n_layers), opened()
    sides = [TargetSide(tiny_target, tiny_draft.token_map, ids, "fp32", one) for one in (None, source)]
    online = train(sides[0], data)

    def refuse(*_):
        raise AssertionError("the target's body ran")

    hook = tiny_target.body.register_forward_pre_hook(refuse)
    try:
        stored = train(sides[1], data)
    finally:
        hook.remove()
        for side in sides:
            side.capture.remove()
    torch.testing.assert_close(torch.tensor(stored[0]), torch.tensor(online[0]), rtol=1e-4, atol=0)
    assert stored[1] == pytest.approx(online[1], rel=1e-6)


def test_the_warm_start_reads_the_store(tiny_target, tiny_draft, data, opened):
    """fc is the regression it is with the target's forward, which never runs (fp32, 1e-3: a solve amplifies
    roundings). Which layer's input it is fitted to, and so what is stored, depends on the head's layers."""
    config = dataclasses.replace(tiny_draft.head.config, num_hidden_layers=3)
    source, heads = opened(layers=3), [Eagle3Head(config) for _ in range(2)]
    batches = [collate([example], data.pad_id) for example in data.train]
    initialise_from_target(heads[0], tiny_target, tiny_draft.token_map, batches, 0)

    def refuse(*_):
        raise AssertionError("the target's body ran")

    hook = tiny_target.body.register_forward_pre_hook(refuse)
    try:
        initialise_from_target(heads[1], tiny_target, tiny_draft.token_map, batches, 0, source)
    finally:
        hook.remove()
    ours, theirs = heads[1].fc.weight, heads[0].fc.weight
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-3


def test_heads_of_the_last_state_store_no_more(tiny_target, data, tmp_path):
    """EAGLE-1/2 and MTP heads read the last hidden state alone: the layers that EAGLE-3 fuses would double the disk."""
    settings = TrainSettings(head=HeadSettings(kind="eagle2"))
    source = offline.offline_features(settings, tiny_target, None, data, tmp_path / "features", ALONE)
    found = source(data.held_out[0])
    assert source.store.spec.layer_ids == (6,) and torch.equal(found.aux, found.last)


def test_only_what_is_missing_is_made(tiny_target, data, opened, monkeypatch, tmp_path):
    """A writer killed between shards continues after the last one; a complete store needs one forward, the check."""
    monkeypatch.setattr(offline, "FORWARD_TOKENS", 64)
    monkeypatch.setattr(feature_store, "SHARD_BYTES", 1)
    read: list[int] = []

    def count(module, args, kwargs):
        read.append(int(kwargs["input_ids"].shape[0]))
        if len(read) == killed_at:
            raise KeyboardInterrupt

    hook = tiny_target.body.register_forward_pre_hook(count, with_kwargs=True)
    try:
        killed_at = 4
        with pytest.raises(KeyboardInterrupt):
            opened()
        stored = sum(read[:-1])
        read, killed_at = [], 0
        assert len(opened().store) == 16
        assert sum(read) == 16 - stored and 0 < stored < 16
        read = []
        assert len(opened().store) == 16 and not read
    finally:
        hook.remove()


def test_no_room_is_told_before_any_forward(tiny_target, opened, monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(FeatureStoreError, match=r"1280 bytes per token x \d+ tokens"):
        opened()
    assert [path.name for path in (tmp_path / "features").iterdir()] == ["manifest.json"]
