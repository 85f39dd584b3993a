"""Messages from the driver to the workers, in the order in which the driver does these things itself."""

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
    """Join the group whose store is at `port`, as that rank, and load the engine. config: its EngineConfig."""

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
    states_seed: bool  # the caller gave `params` a seed; here they always have one


@dataclass(frozen=True)
class Abort:
    """End the request of that arrival."""

    arrival: int


@dataclass(frozen=True)
class Step:
    """One round. written: what `written` returns on the driver before it."""

    written: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Reshape:
    """Draft with that shape from the next step on."""

    shape: DraftShape


@dataclass(frozen=True)
class Decided:
    """A decision of the driver within a round."""

    value: Any


@dataclass(frozen=True)
class Stop:
    """Close the engine and end."""


Message = Load | Add | Abort | Step | Reshape | Decided | Stop


def written(running: Sequence[Request]) -> tuple[tuple[int, int, int], ...]:
    """Per row: arrival of its request, number of its tokens, the last one. Equal on all ranks before every round."""
    return tuple((request.arrival, len(request.output_ids), request.output_ids[-1]) for request in running)


def send(message: Message, pipe: IO[bytes]) -> None:
    """Raises OSError when nobody reads the pipe."""
    pipe.write(pickle.dumps(message))
    pipe.flush()


def receive(pipe: IO[bytes]) -> Message:
    """The driver's next message. Raises EOFError if it has ended, UnpicklingError if it ended within a message."""
    message: Message = pickle.load(pipe)
    return message
