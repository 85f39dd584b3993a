"""A tiny random target with a tokenizer trained here, and an untrained draft head for it: no downloads, no GPU."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "disabled")

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head, default_aux_layer_ids
from toolkit.targets.load import Target
from toolkit.tokenmap.token_map import TokenMap

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = (
    "the quick brown fox jumps over the lazy dog while seven wizards count apples and write short stories about "
    "rivers, trains, numbers 0 1 2 3 4 5 6 7 8 9 and the weather in spring; system user assistant You are helpful."
)
DRAFT_VOCAB = 160
PLAIN = "not (process or compile or soak or slow or gpu or peers)"  # the tier of `pytest` alone

torch.set_num_threads(1)  # of every worker: two workers share two cores


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """`pytest` alone runs the plain tier in two worker processes. Named paths run every tier, in this process."""
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    config.option.markexpr = config.option.markexpr or PLAIN
    if config.option.numprocesses is None and not config.option.usepdb:
        config.option.numprocesses, config.option.dist = 2, "worksteal"


def train_tokenizer(vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with ChatML's specials and template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 8, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    wrapped.chat_template = CHATML
    return wrapped


def build_target(layers: int = 7, seed: int = 0) -> Target:
    """A random fp32 Llama (hidden 64, 4 heads, 2 kv heads) with the tokenizer above."""
    tokenizer = train_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    return Target(model=LlamaForCausalLM(config), tokenizer=tokenizer, name="tiny", revision=None)


def build_draft(target: Target, draft_vocab_size: int = DRAFT_VOCAB, seed: int = 1) -> DraftCheckpoint:
    """An untrained head; its draft vocabulary is a random subset that holds the stop ids."""
    torch.manual_seed(seed)
    config = Eagle3Config.from_target_config(
        target.config,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        aux_layer_ids=default_aux_layer_ids(target.n_layers),
    )
    head = Eagle3Head(config).eval().requires_grad_(False)
    forced = sorted(target.stop_ids)
    others = [token for token in torch.randperm(target.vocab_size).tolist() if token not in target.stop_ids]
    token_map = TokenMap.from_ids(forced + others[: draft_vocab_size - len(forced)], target.vocab_size)
    return DraftCheckpoint(head=head, token_map=token_map)


@pytest.fixture(scope="session")
def tiny_target() -> Target:
    return build_target()


@pytest.fixture(scope="session")
def tiny_draft(tiny_target: Target) -> DraftCheckpoint:
    return build_draft(tiny_target)


@pytest.fixture(scope="session")
def tiny_target_directory(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory):
    """The tiny target as a Hugging Face directory on disk."""
    directory = tmp_path_factory.mktemp("tiny-target")
    tiny_target.model.save_pretrained(directory)
    tiny_target.tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def interpreted_layers(monkeypatch) -> list[str]:
    """Compiled layers run as exported programs in PyTorch's interpreter, one after the other: no C++ compiler, no
    minute. Returns what was asked for, in order."""
    from toolkit.infer.attention.metadata import TreeMetadata
    from toolkit.infer.attention.opaque_attention import now
    from toolkit.infer.cpu import body_ends, compiled_head, compiled_layers, layer_program
    from toolkit.infer.drafters.beams import draft_beams

    asked: list[str] = []

    def program(exported, _inputs, what):
        asked.append(what)
        module = exported.module()

        def run(inputs):
            out = module(*inputs)
            return list(out) if isinstance(out, tuple) else [out]

        return run

    def layers(programs, weights):
        def run(first, hidden, inputs, taps=()):
            for index, tensors in enumerate(inputs, first):
                now.call.layer = index
                for _, keep in (one for one in taps if one[0] == index):
                    keep(hidden)
                hidden = programs[index]([hidden, *tensors, *weights[index]])[0]
            for _, keep in (one for one in taps if one[0] == first + len(inputs)):
                keep(hidden)
            return hidden

        return run

    def body(begin, layers_of_body, end, places):
        def run(ids, positions, taps=()):
            ((of_begin,), (of_its,)), ((of_end,), (of_last,)) = begin, end
            hidden, *others = of_begin([ids, positions, *of_its])
            hidden = layers_of_body(0, hidden, [[others[place] for place in of_layer] for of_layer in places], taps)
            return of_end([hidden, *of_last])[0]

        return run

    class Drafted:
        """What `draft_beams` asks of an DraftRollout, whose passes are programs."""

        def __init__(self, fuse, passes, scores, given, before, counts):
            self.passes, self.scores = passes, scores
            hidden, tokens, *self.tables = given
            rows, read = len(counts), tokens.shape[1] // len(counts)
            hidden = fuse[tokens.shape[1] > 1](0, hidden, [()]) if fuse else hidden
            at = torch.tensor(before)[:, None] + torch.arange(read)
            self.states = self.read(hidden, tokens, at).view(rows, read, -1)
            self.lengths = [one + more for one, more in zip(before, counts, strict=True)]
            self.tokens, self.nodes, self.begun, self.level = tokens.view(rows, -1), read, read, 0
            self.roots = torch.tensor(counts)[:, None] - 1
            self.sees = torch.zeros(rows, read, 0, dtype=torch.bool)

        def read(self, hidden, tokens, positions):
            at = positions.reshape(1, -1)
            return self.passes[tokens.shape[1] > 1](0, hidden, [(tokens, at, *(table[at] for table in self.tables))])

        def at_roots(self):
            return self.states[torch.arange(len(self.roots)), self.roots[:, 0]]

        def logits(self, states):
            flat = states.reshape(1, -1, states.shape[-1])
            return self.scores[flat.shape[1] > 1](0, flat, [()]).view(*states.shape[:-1], -1)

        def grow(self, tokens, parents):
            rows, k = tokens.shape
            every = torch.arange(rows)[:, None]
            own = torch.eye(k, dtype=torch.bool).expand(rows, k, k)
            seen = torch.cat((self.sees[every, parents], own), dim=2)
            self.sees = torch.cat((torch.nn.functional.pad(self.sees, (0, k)), seen), dim=1)
            cache, first_row = now.plan._rows_of_cache
            lengths, span = torch.tensor(self.lengths), max(self.lengths) + seen.shape[2]
            now.start(TreeMetadata(cache, now.plan._table, lengths, span, seen, None, first_row), now.rows)
            at = (torch.tensor(self.lengths)[:, None] + self.level).expand(rows, k)
            hidden = self.read(self.states[every, parents].view(1, rows * k, -1), tokens.reshape(1, -1), at)
            self.states = torch.cat((self.states, hidden.view(rows, k, -1)), dim=1)
            self.nodes, self.level = self.nodes + k, self.level + 1
            return self.states[:, -k:]

    def drafts(fuse, passes, scores, to_target, _top):
        def run(given, before, counts, shape, kept):
            nodes = Drafted(fuse, passes, scores, given, before, counts)
            tokens, parents, _, found = draft_beams(nodes, shape, kept, to_target)
            return tokens, parents, found

        return run

    monkeypatch.setattr(layer_program, "_program", program)
    for module in (compiled_layers, compiled_head):
        monkeypatch.setattr(module, "RunnableLayers", layers)
    monkeypatch.setattr(compiled_head, "RunnableDrafts", drafts)
    monkeypatch.setattr(body_ends, "RunnableBody", body)
    monkeypatch.setattr(body_ends, "RunnableLayers", lambda programs, weights: (programs, weights))
    return asked
