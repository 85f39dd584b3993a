"""Features from disk train the head that features of the target's forward train, and nothing is trusted blindly."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from toolkit.data import feature_store
from toolkit.data.batches import BatchPlan, Example, collate
from toolkit.data.feature_store import FeatureSpec, FeatureStore, FeatureStoreError
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.heads.head_config import default_aux_layer_ids
from toolkit.targets.features import AuxCapture
from toolkit.train import offline_features as offline
from toolkit.train.step import TargetSide, forecast_accept_length, micro_step, supervised_counts
from toolkit.train.trained_head import TrainedHead
from toolkit.train.training_data import Data
from toolkit.train.warm_start import initialise_from_target, initialise_random
from toolkit.train_settings import HeadSettings, TrainSettings

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


def train(side: TargetSide, data: Data, shift: int) -> tuple[list[list[float]], float]:
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
        counts = supervised_counts(batch, K, shift).clamp(min=1)
        loss, by_step, *_ = micro_step(model, side, batch, counts, K, shift)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(by_step.tolist())
    return losses, forecast_accept_length(model, side, data.held_out, K).accept_length


@pytest.mark.parametrize("shift", [0, 1])
def test_the_curve_is_that_of_online_features(tiny_target, tiny_draft, data, opened, shift):
    """fp32, 30 steps, every step's losses to 1e-4: the writer's forward has other batches, so only roundings differ.
    What is not stored (each text's last position, the padding) must reach no loss, and the target's body not run."""
    ids, source = default_aux_layer_ids(tiny_target.n_layers), opened()
    sides = [TargetSide(tiny_target, tiny_draft.token_map, ids, "fp32", one) for one in (None, source)]
    online = train(sides[0], data, shift)

    def refuse(*_):
        raise AssertionError("the target's body ran")

    hook = tiny_target.body.register_forward_pre_hook(refuse)
    try:
        stored = train(sides[1], data, shift)
    finally:
        hook.remove()
        for side in sides:
            side.capture.remove()
    torch.testing.assert_close(torch.tensor(stored[0]), torch.tensor(online[0]), rtol=1e-4, atol=0)
    assert stored[1] == pytest.approx(online[1], rel=1e-6)


@pytest.mark.parametrize("layers", [1, 3])
def test_the_warm_start_reads_the_store(tiny_target, tiny_draft, data, opened, layers):
    """fc is the regression it is with the target's forward, which never runs (fp32, 1e-3: a solve amplifies
    roundings). Which layer's input it is fitted to, and so what is stored, depends on the head's layers."""
    config = dataclasses.replace(tiny_draft.head.config, num_hidden_layers=layers)
    source, heads = opened(layers=layers), [Eagle3Head(config) for _ in range(2)]
    batches = [collate([example], data.pad_id) for example in data.train]
    r2 = [initialise_from_target(heads[0], tiny_target, tiny_draft.token_map, batches, 0)]

    def refuse(*_):
        raise AssertionError("the target's body ran")

    hook = tiny_target.body.register_forward_pre_hook(refuse)
    try:
        r2.append(initialise_from_target(heads[1], tiny_target, tiny_draft.token_map, batches, 0, source))
    finally:
        hook.remove()
    assert r2[0] == pytest.approx(r2[1], rel=1e-2)
    ours, theirs = heads[1].fc.weight, heads[0].fc.weight
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-3


def test_every_stored_position_is_the_targets(tiny_target, data, opened):
    """fp32, 1e-4 where states are of size 1; the last layer's input, which the warm start wants, too."""
    source, batch = opened(), data.held_out[0]
    assert source.store.spec.layer_ids == (2, 3, 4, 6)
    capture = AuxCapture(tiny_target, (2, 3, 4, 6))
    with torch.no_grad():
        last = tiny_target.body(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    two, three, four, six = capture.take_each()
    capture.remove()
    found = source(batch)
    for row, length in enumerate(batch.lengths.tolist()):
        for ours, theirs in (
            (found.aux, torch.cat((two, three, four), dim=-1)), (found.last, last), (source.layer(batch, 6), six),
        ):  # fmt: skip
            torch.testing.assert_close(ours[row, : length - 1], theirs[row, : length - 1], rtol=1e-4, atol=1e-4)


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
        assert sum(read) == 16 - stored + 1 and 0 < stored < 16
        read = []
        assert len(opened().store) == 16 and read == [1]
    finally:
        hook.remove()


def test_two_processes_share_the_work(tiny_target, data, opened, monkeypatch, tmp_path):
    """Each writes its share, and sees the other's after the barrier; together they leave out nothing."""
    folder = tmp_path / "features"
    spec = FeatureSpec.of(tiny_target, offline.stored_layer_ids(TrainSettings(), tiny_target))
    barriers = []

    def barrier():
        barriers.append(1)
        if len(barriers) == 3:  # the other process has written its share, too
            other = FeatureStore(folder, spec)
            texts = offline.texts_of(data)
            offline.write_features(other, tiny_target, [text for text in texts if text not in other])

    first = SimpleNamespace(is_main_process=True, process_index=0, num_processes=2, wait_for_everyone=barrier)
    ids = default_aux_layer_ids(tiny_target.n_layers)
    source = offline.offline_features(TrainSettings(), tiny_target, ids, data, folder, first)
    assert len(source.store) == 16 and len(list(folder.glob("shard-*"))) == 2
    assert all(text in source.store for text in offline.texts_of(data))


def test_a_target_trained_further_is_another(tiny_target, opened):
    """Name and configuration are the same, so the manifest cannot tell; the states can."""
    opened()
    weight = tiny_target.layers[3].mlp.down_proj.weight
    before = weight.clone()
    try:
        weight.mul_(1.1)
        with pytest.raises(FeatureStoreError, match="not computed with the current weights of tiny"):
            opened()
    finally:
        weight.copy_(before)
    opened()


def test_no_room_is_told_before_any_forward(tiny_target, opened, monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(FeatureStoreError, match=r"1280 bytes per token x \d+ tokens"):
        opened()
    assert [path.name for path in (tmp_path / "features").iterdir()] == ["manifest.json"]
