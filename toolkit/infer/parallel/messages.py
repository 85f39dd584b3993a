"""Messages from the driver to the workers. Their order is the order of the driver's own calls."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request


@dataclass(frozen=True)
class Load:
    """Join the group with its store at `port` as `rank`, and load the engine. config: an EngineConfig."""

    rank: int
    size: int
    port: int
    config: Any


@dataclass(frozen=True)
class Add:
    """A new request. arrival: its number in the engine of each rank."""

    arrival: int
    prompt_ids: list[int]
    params: SamplingParams
    speculative: bool
    shape: DraftShape | None
    states_seed: bool  # the caller set a seed; `params` here always has one


@dataclass(frozen=True)
class Abort:
    """End the request of that arrival."""

    arrival: int


@dataclass(frozen=True)
class Step:
    """Run one round. written: the driver's result of `written` before it."""

    written: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Reshape:
    """Draft with another shape from the next step on."""

    shape: DraftShape


@dataclass(frozen=True)
class Decided:
    """A decision of the driver within a round."""

    value: Any


@dataclass(frozen=True)
class Stop:
    """Close the engine and end the process."""


Message = Load | Add | Abort | Step | Reshape | Decided | Stop


def written(running: Sequence[Request]) -> tuple[tuple[int, int, int], ...]:
    """Per row: arrival of its request, number of output tokens, last token. Equal on all ranks before every round."""
    return tuple((request.arrival, len(request.output_ids), request.output_ids[-1]) for request in running)


def send(message: Message, pipe: IO[bytes]) -> None:
    """Write a message to a pipe. Raises OSError if the pipe has no reader."""
    pipe.write(pickle.dumps(message))
    pipe.flush()


def receive(pipe: IO[bytes]) -> Message:
    """Read the driver's next message. Raises EOFError if the driver has ended, UnpicklingError if within a message."""
    message: Message = pickle.load(pipe)
    return message
