"""Default sampling settings: those of the target's generation config, as in vLLM and SGLang."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from toolkit.log import get_logger
from toolkit.targets.target import Target

logger = get_logger(__name__)

NOT_APPLIED = {"no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0}


@dataclass(frozen=True)
class DefaultSampling:
    """The default settings of one server. Settings that the target does not state have OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, target: Target) -> DefaultSampling:
        """Read the target's generation config. Log a warning for settings that the engine does not apply."""
        config: Any = getattr(target.model, "generation_config", None)
        stated = config.to_diff_dict() if config is not None else {}
        for name, neutral in NOT_APPLIED.items():
            if stated.get(name) not in (None, neutral):
                logger.warning(
                    "the target's generation config asks for %s=%s, which is not applied", name, stated[name]
                )
        names = [field.name for field in fields(cls)]
        return cls(**{name: stated[name] for name in names if stated.get(name) is not None})

    @property
    def text(self) -> str:
        """The settings in one line, without those that are off."""
        parts = [f"temperature {self.temperature:g}", f"top_p {self.top_p:g}"]
        parts += [f"top_k {self.top_k}"] if self.top_k else []
        parts += [f"min_p {self.min_p:g}"] if self.min_p else []
        parts += [f"repetition_penalty {self.repetition_penalty:g}"] if self.repetition_penalty != 1 else []
        return ", ".join(parts)
