"""Training batches: the order of an epoch, right padding, and the mask of supervised predictions.

Shapes: B sequences, L positions (the longest sequence of the batch).
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Examples are sorted by length within runs of this many batches: little padding, but still a random order.
BATCHES_PER_BUCKET = 32


def on_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return the tensor on a device. To a GPU it goes in stream order, from pinned memory: the host does not wait."""
    pinned = tensor.device.type == "cpu" and torch.device(device).type == "cuda"
    return (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=pinned)


@dataclass(frozen=True)
class Example:
    """One rollout: its ids, and for each id whether it belongs to an answer of the target.

    greedy: the target wrote the answer at temperature 0, so that each response id is the target's argmax.
    """

    id: str
    input_ids: list[int]
    response: list[bool]
    greedy: bool = False


@dataclass(frozen=True)
class Batch:
    """Right-padded rows: input_ids [B, L] int64, response [B, L] bool (False on padding), lengths [B] int64.

    starts [B, L] int64 is set for packed rows, which hold several sequences: the position at which the sequence of each
    position begins (for padding: the position itself). It is None when each row is one sequence.
    greedy [B, L] bool: ids known to be the target's argmax after the ids before them; None: none are known.
    """

    input_ids: Tensor
    response: Tensor
    lengths: Tensor
    starts: Tensor | None = None
    greedy: Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        input_ids, response, lengths = (on_device(x, device) for x in (self.input_ids, self.response, self.lengths))
        starts, greedy = (None if x is None else on_device(x, device) for x in (self.starts, self.greedy))
        return Batch(input_ids, response, lengths, starts, greedy)

    def sequences(self) -> Iterator[tuple[int, int, int]]:
        """Yield (row, start, end) of every sequence."""
        for row, length in enumerate(self.lengths.tolist()):
            begins = [0] if self.starts is None else self.starts[row, :length].unique().tolist()
            yield from ((row, start, end) for start, end in zip(begins, [*begins[1:], length], strict=True))


class BatchPlan:
    """The global batches of each epoch: a pure function of (lengths, global_batch, seed, epoch).

    Every epoch contains each example once. Examples are shuffled, split into runs of `BATCHES_PER_BUCKET` batches,
    sorted by length within a run and split into batches; then the batches are shuffled. The remainder forms one short
    batch, which may leave some processes without examples. The plan does not depend on the number of processes: each
    process takes its part of a global batch with `process_share`. Memory: 8 bytes per example, and about 60 more during
    an epoch.
    """

    def __init__(self, lengths: Sequence[int], global_batch: int, seed: int) -> None:
        self.lengths = array("q", lengths)
        self.global_batch = global_batch
        self.seed = seed

    def __len__(self) -> int:
        """Global batches per epoch."""
        return -(-len(self.lengths) // self.global_batch)

    def epoch(self, epoch: int) -> list[list[int]]:
        """The global batches of one epoch, as lists of example indices."""
        draw = random.Random(f"batches {self.seed} {epoch}")
        order = list(range(len(self.lengths)))
        draw.shuffle(order)
        bucket = self.global_batch * BATCHES_PER_BUCKET
        batches: list[list[int]] = []
        for start in range(0, len(order), bucket):
            run = sorted(order[start : start + bucket], key=lambda index: self.lengths[index])
            batches += [run[first : first + self.global_batch] for first in range(0, len(run), self.global_batch)]
        draw.shuffle(batches)
        return batches

    def from_position(self, epoch: int = 0, index: int = 0) -> Iterator[tuple[int, int, list[int]]]:
        """Yield (epoch, index in the epoch, batch) without end, from a position on, to resume a training."""
        while True:
            for at, batch in enumerate(self.epoch(epoch)):
                if at >= index:
                    yield epoch, at, batch
            epoch, index = epoch + 1, 0


def process_share(batch: Sequence[int], rank: int, processes: int) -> list[int]:
    """Return every `processes`-th example of a global batch from `rank` on, which balances number and length."""
    return list(batch[rank::processes])


def micro_batches(
    shares: Sequence[Sequence[Example]], rank: int, size: int, budget: int | None = None
) -> list[list[list[Example]]]:
    """Return the rows of each micro-batch of process `rank`, of which all processes have equally many: the last ones
    may have no rows. shares: the examples of each process.

    A micro-batch has `size` rows of one example; with a budget as many rows as have so many positions, at least one.
    Its rows are as long as the longest example of the share, and hold as many examples as fit.
    """
    cut = []
    for share in shares:
        rows, each = [[example] for example in share], size
        if budget is not None and share:
            longest = max(len(example.input_ids) for example in share)
            rows, each = _packed(share, longest), max(1, budget // longest)
        cut.append([rows[start : start + each] for start in range(0, len(rows), each)])
    most = max(len(one) for one in cut)
    return cut[rank] + [[] for _ in range(most - len(cut[rank]))]


def collate(examples: Sequence[Example], pad_id: int, *, pack: bool = False) -> Batch:
    """`collate_rows` of one example a row or, with `pack`, of as many as fit beside the longest one."""
    longest = max(len(example.input_ids) for example in examples)
    return collate_rows(_packed(examples, longest) if pack else [[example] for example in examples], pad_id)


def collate_rows(rows: Sequence[Sequence[Example]], pad_id: int) -> Batch:
    """Build a batch of rows of examples, right-padded with `pad_id` to the longest row."""
    longest = max(sum(len(example.input_ids) for example in row) for row in rows)
    input_ids = torch.full((len(rows), longest), pad_id, dtype=torch.long)
    response = torch.zeros((len(rows), longest), dtype=torch.bool)
    greedy = torch.zeros_like(response)
    starts = torch.arange(longest).repeat(len(rows), 1)
    lengths = []
    for row, together in enumerate(rows):
        begin = 0
        for example in together:
            end = begin + len(example.input_ids)
            input_ids[row, begin:end] = torch.tensor(example.input_ids, dtype=torch.long)
            response[row, begin:end] = torch.tensor(example.response, dtype=torch.bool)
            greedy[row, begin:end] = response[row, begin:end] & example.greedy
            starts[row, begin:end] = begin
            begin = end
        lengths.append(begin)
    packed = any(len(row) > 1 for row in rows)
    return Batch(input_ids, response, torch.tensor(lengths), starts if packed else None, greedy)


def _packed(examples: Sequence[Example], width: int) -> list[list[Example]]:
    """Pack examples into rows of at most `width` ids: the longest first, each into the first row with room (FFD)."""
    rows: list[list[Example]] = []
    room: list[int] = []
    for example in sorted(examples, key=lambda one: -len(one.input_ids)):
        size = len(example.input_ids)
        row = next((number for number, left in enumerate(room) if left >= size), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(width)
        rows[row].append(example)
        room[row] -= size
    return rows


# Root t, step k: the head reads the embedding of x_{t+1+k} and predicts x_{t+2+k}. It is supervised iff both are
# response ids. The target always writes A0, so it is never predicted; the last predicted id is the end of the turn (E).
#
#   position   0  1  2  3  4  5  6  7  8          supervised roots t -> what they predict
#   token      p  p  p  A0 A1 A2 E  \n p
#   response   .  .  .  #  #  #  #  .  .          step 0 (x_{t+2}):  2 -> A1   3 -> A2   4 -> E
#                    t=2 |  |                     step 1 (x_{t+3}):  1 -> A1   2 -> A2   3 -> E
#                 feature emb->predict            step 2 (x_{t+4}):  0 -> A1   1 -> A2   2 -> E
def supervised_mask(response: Tensor, step: int, starts: Tensor | None = None) -> Tensor:
    """Return the mask [B, L] bool of supervised roots t at `step` k: response[t+1+k] and response[t+2+k].

    `starts` [B, L] (see `Batch`) excludes predictions across the sequences of a row.
    """
    width = response.shape[1]
    supervised = torch.zeros_like(response)
    roots = width - (step + 2)
    if roots <= 0:
        return supervised
    supervised[:, :roots] = response[:, step + 1 : step + 1 + roots] & response[:, step + 2 :]
    if starts is not None:
        supervised[:, :roots] &= starts[:, step + 2 :] <= torch.arange(roots, device=response.device)
    return supervised
