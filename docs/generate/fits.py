"""The table of docs/training.md: the cards on which a head can be trained for targets of usual sizes."""

from __future__ import annotations

from pathlib import Path

from tables import table
from transformers import AutoConfig

from toolkit.recipe import load_recipe
from toolkit.targets.facts import facts_of
from toolkit.targets.stand_in import SHAPES
from toolkit.train.needed_memory import GB, USABLE, TrainingMemory

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "qwen3-8b.yaml"
TARGETS, CARDS, CARD = ("qwen3-8b", "qwen3-30b-a3b", "qwen3-32b", "llama-3.3-70b"), (1, 2, 8), 80 * GB
WAYS = {"": [], ", sharded": ["train.target=sharded", "train.evaluation.real_every=null"]}


def fits() -> str:
    memories = (TrainingMemory(facts_of(AutoConfig.for_model(**SHAPES[name]), name), 2, None, CARD) for name in TARGETS)
    rows = ([one.facts.name, *(_cell(one, processes) for processes in CARDS)] for one in memories)
    return table(["target", *(f"{count} x 80 GB" for count in CARDS)], rows)


def _cell(memory: TrainingMemory, processes: int) -> str:
    for said, overrides in WAYS.items():
        train = load_recipe(RECIPE, ["train.head.aux_layer_ids=null", *overrides]).train
        need = memory.needed(train, processes).total
        if need <= USABLE * CARD:
            return f"{need / GB:.0f} GB{said}"
    return f"no: {need / GB:.0f} GB"
