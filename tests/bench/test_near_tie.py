import torch

from toolkit.bench.near_tie import (
    find_divergence,
    greedy_near_tie,
    sampled_near_tie,
)

BF16, FP32 = torch.bfloat16, torch.float32


def scripted(row):
    """A target whose logits after any prefix are `row`; remembers the prefixes it was asked for."""
    asked = []

    def logits_after(written):
        asked.append(list(written))
        return torch.tensor(row)

    return logits_after, asked


def test_gap_within_noise_is_a_near_tie_in_bf16_and_an_error_in_fp32():
    """Row of magnitude 16: bf16 noise 0.5. The same gap in fp32 cannot come from rounding."""
    logits_after, asked = scripted([1.0, 16.0, 15.75, -3.0])
    found = find_divergence([7, 8, 1, 5], [7, 8, 2, 6], logits_after, BF16)
    assert found.near_tie and found.position == 2 and asked == [[7, 8]]
    assert (found.plain_logit, found.speculative_logit, found.top_logit, found.noise) == (16.0, 15.75, 16.0, 0.5)
    assert not find_divergence([7, 8, 1, 5], [7, 8, 2, 6], logits_after, FP32).near_tie


def test_two_close_tokens_far_below_the_best_are_an_error():
    """Both runs chose wrongly: comparing the two logits with each other alone would call that a near-tie."""
    assert not greedy_near_tie(torch.tensor([16.0, 10.0, 10.1]), (1, 2), 0.5)


def test_sampled_bound_holds_for_noise_of_the_worst_kind():
    """Moving the logits up to a border by +noise/2 and the others by -noise/2 must not pick a token that is refused."""
    generator = torch.Generator().manual_seed(0)
    for noise in (0.01, 0.3, 1.0):
        for token in range(11):
            row = 3 * torch.randn(12, generator=generator).double()
            side = torch.arange(12) <= token
            moved = torch.softmax(row + torch.where(side, noise / 2, -noise / 2), -1).cumsum(-1)[token].item()
            assert sampled_near_tie(row, (token,), noise + 1e-6, moved)
            beyond = moved + 0.01 * (1 - moved)
            assert not sampled_near_tie(row, (token,), noise, beyond)


def test_sampled_answers_are_judged_in_float32_alone():
    """A bound that admits odds off by e^0.7 calls errors of the engine near-ties; so the target is not even asked."""
    logits_after, asked = scripted([0.0, 0.0])
    found = find_divergence([5, 0], [5, 1], logits_after, BF16, temperature=0.7, uniform_at=lambda _: 0.5)
    assert found.near_tie is None and found.position == 1 and asked == []
    assert find_divergence([5, 0], [5], logits_after, BF16, temperature=0.7, uniform_at=lambda _: 0.5).near_tie is False
