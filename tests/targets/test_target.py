import copy

import pytest
import torch

from toolkit.errors import TargetError
from toolkit.targets.target import Target, end_of_turn_id


def rebuilt(target: Target, **changes) -> Target:
    parts = {"model": target.model, "tokenizer": target.tokenizer, "name": target.name, "revision": None}
    return Target(**{**parts, **changes})


def with_template(target: Target, template: str | None):
    tokenizer = copy.deepcopy(target.tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def test_body_norm_and_head_are_the_model_s_own_forward(tiny_target, sample_ids):
    """The engine and the teacher take logits from these parts; a second norm, or none, changes every token."""
    hidden = tiny_target.body(input_ids=sample_ids, use_cache=False).last_hidden_state
    assert torch.equal(tiny_target.logits(hidden), tiny_target.model(sample_ids).logits)
    outputs = tiny_target.model(sample_ids, output_hidden_states=True)
    assert torch.equal(outputs.hidden_states[-1], hidden)


def test_stop_ids_come_from_all_four_places(tiny_target):
    """Hub models state their ends in different places; one that is missed makes answers run to the length limit."""
    model = copy.deepcopy(tiny_target.model)
    model.generation_config.eos_token_id = [5, 6]
    model.config.eos_token_id = 7
    tokenizer = with_template(tiny_target, "{% for m in messages %}{{ m['content'] }}<|endoftext|>{% endfor %}")
    target = rebuilt(tiny_target, model=model, tokenizer=tokenizer)
    assert target.stop_ids == {0, 2, 5, 6, 7}  # 2 is the tokenizer's eos, 0 the template's end of turn


@pytest.mark.parametrize(
    "template, expected",
    [
        ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}", 2),
        ("{% for m in messages %}{{ m['content'] }} \n <|endoftext|><|im_end|>{% endfor %}", 0),
        ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}", None),
        ("{% for m in messages %}{% for c in m['content'] %}{{ c['text'] }}{% endfor %}<|im_end|>{% endfor %}", 2),
    ],
)
def test_end_of_turn_is_the_special_token_right_after_the_answer(tiny_target, template, expected):
    """Found by rendering, not by a list of names; a plain word or the next speaker's tag must not become a stop id."""
    assert end_of_turn_id(with_template(tiny_target, template)) == expected


def test_a_template_that_drops_questions_is_refused(tiny_target):
    """It wrote the same empty prompt for every question, and rollouts answered that."""
    tokenizer = with_template(tiny_target, "{% for m in messages %}{{ m['role'] }}{{ m['words'] }}{% endfor %}")
    with pytest.raises(TargetError, match="leaves the text of a user's message out"):
        end_of_turn_id(tokenizer)
