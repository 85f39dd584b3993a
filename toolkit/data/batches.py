"""Training batches: the plan of an epoch, right padding, and which predictions are supervised.

Shapes: B sequences, L positions (the longest of the batch).
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.data.jsonl import DataError

# Batches are cut from runs of this many shuffled batches sorted by length: little padding, still a random order.
BATCHES_PER_BUCKET = 32


@dataclass(frozen=True)
class Example:
    """One rollout: its ids and, per id, whether the target wrote it as (part of) an answer.

    greedy: it wrote them at temperature 0, so that each of these ids is its own argmax.
    """

    id: str
    input_ids: list[int]
    response: list[bool]
    greedy: bool = False


@dataclass(frozen=True)
class Batch:
    """Right-padded rows: input_ids [B, L] int64, response [B, L] bool (False on padding), lengths [B] int64.

    starts [B, L] int64, where rows hold several sequences one after the other: the position at which each position's
    own sequence begins (of padding: its own position); None where each row is one sequence.
    greedy [B, L] bool: ids that are known to be the target's argmax behind those before them; None: none are.
    """

    input_ids: Tensor
    response: Tensor
    lengths: Tensor
    starts: Tensor | None = None
    greedy: Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        input_ids, response, lengths = (x.to(device) for x in (self.input_ids, self.response, self.lengths))
        starts, greedy = (None if x is None else x.to(device) for x in (self.starts, self.greedy))
        return Batch(input_ids, response, lengths, starts, greedy)

    def sequences(self) -> Iterator[tuple[int, int, int]]:
        """Row, first position and end of every sequence."""
        for row, length in enumerate(self.lengths.tolist()):
            begins = [0] if self.starts is None else self.starts[row, :length].unique().tolist()
            yield from ((row, start, end) for start, end in zip(begins, [*begins[1:], length], strict=True))


class BatchPlan:
    """Which examples form which global batch, in which order: a pure function of (lengths, global_batch, seed, epoch).

    Every epoch holds each example once. Examples are shuffled, cut into runs of `BATCHES_PER_BUCKET` batches, sorted by
    length inside a run, cut into batches, and the batches are shuffled. The remainder is kept as one short batch (which
    may give a process nothing when there are more processes than its rows). The number of processes plays no part: a
    process takes its share of each global batch with `process_share`. Memory: 8 bytes an example, and some 60 more
    while an epoch goes on.
    """

    def __init__(self, lengths: Sequence[int], global_batch: int, seed: int) -> None:
        if global_batch < 1:
            raise DataError(f"global_batch {global_batch} came; at least 1 sequence is needed")
        if not lengths:
            raise DataError("no examples came; a plan needs at least one")
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
        """Endless (epoch, index in the epoch, batch), beginning at a position: how an interrupted training goes on."""
        while True:
            for at, batch in enumerate(self.epoch(epoch)):
                if at >= index:
                    yield epoch, at, batch
            epoch, index = epoch + 1, 0


def process_share(batch: Sequence[int], rank: int, processes: int) -> list[int]:
    """Every `processes`-th example of a global batch from `rank` on: even in number (within one) and in length."""
    return list(batch[rank::processes])


def collate(examples: Sequence[Example], pad_id: int, *, pack: bool = False) -> Batch:
    """Rows right-padded with `pad_id` to the longest example: one example each, or (`pack`) as many as fit."""
    if not examples:
        raise DataError("an empty list of examples came; a batch needs at least one")
    longest = max(len(example.input_ids) for example in examples)
    rows = _packed(examples, longest) if pack else [[example] for example in examples]
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
    packed = len(rows) < len(examples)
    return Batch(input_ids, response, torch.tensor(lengths), starts if packed else None, greedy)


def _packed(examples: Sequence[Example], width: int) -> list[list[Example]]:
    """Examples in rows of at most `width` ids, the longest first, each into the first row with room for it."""
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


# Root t, step k: the head reads the embedding of x_{t+1+k} and predicts x_{t+2+k}. Supervised: both are response ids.
# So A0, which always comes from the target, is never predicted, and the last id predicted is the end of the turn (E).
#
#   position   0  1  2  3  4  5  6  7  8          supervised roots t -> what they predict
#   token      p  p  p  A0 A1 A2 E  \n p
#   response   .  .  .  #  #  #  #  .  .          step 0 (x_{t+2}):  2 -> A1   3 -> A2   4 -> E
#                    t=2 |  |                     step 1 (x_{t+3}):  1 -> A1   2 -> A2   3 -> E
#                 feature emb->predict            step 2 (x_{t+4}):  0 -> A1   1 -> A2   2 -> E
#
# shift=1 (the mask lags by one):                 step 0 (x_{t+2}):  3 -> A2   4 -> E    5 -> \n
def supervised_mask(
    response: Tensor, step: int, shift: int = 0, lengths: Tensor | None = None, starts: Tensor | None = None
) -> Tensor:
    """[B, L] bool: is root t supervised at `step` k? Iff response[t+1+k] and response[t+2+k]; False past the end.

    `shift` is for one experiment: 1 makes the mask lag the predictions by one, response[t+k] and response[t+1+k], the
    defect of SpecForge issue 885: the first draft of an answer (A1) never gets a loss, and ids after the answer do.
    (There the mask is response[t+k] alone: one id more after the answer; equal where a sequence ends with its answer.)
    `lengths` [B] keeps a shifted mask off the padding; without a shift padding is never supervised. `starts` [B, L]
    (see `Batch`) keeps roots off the tokens of other sequences in their row.
    """
    if step < 0:
        raise ValueError(f"step {step} came; steps count from 0")
    if shift not in (0, 1):
        raise ValueError(f"shift {shift} came; 0 (exact) or 1 (the lagging mask of the experiment) is needed")
    width = response.shape[1]
    supervised = torch.zeros_like(response)
    roots = width - (step + 2)
    if roots <= 0:
        return supervised
    first = step + 1 - shift
    supervised[:, :roots] = response[:, first : first + roots] & response[:, first + 1 : first + 1 + roots]
    if lengths is not None:
        predicted = torch.arange(width, device=response.device) + step + 2
        supervised &= predicted[None, :] < lengths[:, None]
    if starts is not None:
        supervised[:, :roots] &= starts[:, step + 2 :] <= torch.arange(roots, device=response.device)
    return supervised
