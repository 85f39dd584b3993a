"""SGLang's and vLLM's flags of `toolkit serve`, and its flags from a file."""

from __future__ import annotations

import argparse
import json

import pytest

from toolkit.cli import command_parser, main
from toolkit.commands.engine_aliases import ALIASES, METHODS, TABLE, check_draft_kind
from toolkit.commands.model_arguments import OPTIONS, engine_config
from toolkit.head_kinds import HEAD_KINDS
from toolkit.heads.draft_head import head_class
from toolkit.infer.engine.config import ConfigError, EngineConfig


def config(*line):
    return engine_config(command_parser("serve")[1](line))


def vllm(**settings):
    return "--speculative-config", json.dumps(settings)


SGLANG = (
    "--model-path", "t", "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "d",
    "--speculative-num-steps", "5", "--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "16",
    "--speculative-token-map", "freq.pt", "--tp-size", "2", "--mem-fraction-static", "0.7", "--context-length", "512",
)  # fmt: skip


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        (SGLANG, {"target": "t", "draft": "d", "shape": "5,4,16", "token_map": "freq.pt", "tensor_parallel_size": 2,
                  "mem_fraction_static": 0.7, "context_length": 512}),
        (("--speculative-num-draft-tokens", "8", "--speculative-algorithm", "ngram"),
         {"shape": "7,1,8", "draft": "ngram"}),
        (("--model", "t", "--speculative-algorithm", "NEXTN"), {"target": "t", "draft": "native"}),
        (("--max-model-len", "64", "--max-num-seqs", "3", "--enforce-eager", "--disable-radix-cache"),
         {"context_length": 64, "max_running_requests": 3, "disable_cuda_graph": True, "prefix_cache": False}),
        (vllm(method="eagle3", model="d", num_speculative_tokens=4), {"draft": "d", "shape": "4,1,5"}),
        (vllm(model="org/d", revision="v2", draft_token_map="f.pt"),
         {"draft": "org/d@v2", "token_map": "f.pt"}),
        (vllm(method="deepseek_mtp", num_speculative_tokens=1), {"draft": "native", "shape": "1,1,2"}),
        (("--model", "t", *vllm(method="mtp", model="t")), {"target": "t", "draft": "native"}),
        (vllm(model="[ngram]", num_speculative_tokens=2), {"draft": "ngram", "shape": "2,1,3"}),
        (("--shape", "mtp-4", "--speculative-num-steps", "3"), {"shape": "mtp-4"}),
    ],
)  # fmt: skip
def test_flags_of_other_servers_are_ours(line, ours):
    """A start script that was written for another server starts the same engine here."""
    assert config(*line) == EngineConfig(**ours)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (("--shape", "4,1,5", "--speculative-num-steps", "3"), "--shape (4,1,5) and --speculative-num-steps 3 (3,1,4)"),
        (("--speculative-num-steps", "4", *vllm(method="ngram", num_speculative_tokens=2)), "contradict"),
        (("--speculative-eagle-topk", "4"), "needs --speculative-num-steps and --speculative-num-draft-tokens too"),
        (("--speculative-algorithm", "EAGLE3"), "needs a head; give its directory by --draft"),
        (("--speculative-moe-runner-backend", "x"), "drafting is set by --draft, --shape"),
        (("--speculative-config", "{method: ngram}"), "not valid JSON"),
        (vllm(method="medusa", model="d"), "is not supported; eagle, eagle3, nextn"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(capsys, line, says):
    """A flag that is ignored, or one of two that contradict each other, would serve something else than was asked."""
    assert main(["serve", "--target", "t", *line]) == 2
    assert says in capsys.readouterr().err


def test_the_head_must_be_of_the_kind_that_was_named():
    """A script that names EAGLE3 was tuned for it; another head would be slow without a word."""
    args = command_parser("serve")[1](["--draft", "d", "--speculative-algorithm", "EAGLE3", *vllm(model="d")])
    check_draft_kind(args, "eagle3")
    check_draft_kind(args, None)
    with pytest.raises(ConfigError, match="EAGLE3 is for heads of the kind eagle3, and the draft is of the kind mtp"):
        check_draft_kind(args, "mtp")


def test_tables_agree_with_the_heads_and_the_flags():
    """Names of a kind stand with the kind. A refused flag that exists, or an alias of no option, could not be typed."""
    for kind in HEAD_KINDS:
        names = head_class(kind).config_class.engine_names
        assert names is None or all(kind in METHODS[name.lower()] for name in (names.sglang, names.vllm))
    assert {alias.option for alias in ALIASES.values()} <= {"", "method", *OPTIONS}
    flags = command_parser("serve")[0]._option_string_actions
    refused = TABLE.keys() - ALIASES.keys()
    assert not {f"--{name.replace('_', '-')}" for name in refused} & flags.keys()


def read(tmp_path, text, *line):
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    return command_parser("serve")[1](["--config", str(path), *line])


def test_flags_from_a_file(tmp_path):
    """The file says what flags say, with typed ones before it, also where it uses another server's names."""
    text = """
target: t
speculative-config: {method: eagle3, model: d, num_speculative_tokens: 4}
max_running_requests: 3
adaptive: false
no-draft: true
torch-compile: false
port: 9000
log-interval: 2
request-timeout: 5
allowed-origins: [http://a, http://b]
"""
    args = read(tmp_path, text, "--speculative-num-steps", "2", "--port", "8000")
    wanted = EngineConfig(
        target="t", draft="d", shape="2,1,3", max_running_requests=3, adaptive=False, no_draft=True
    )  # fmt: skip
    assert engine_config(args) == wanted
    assert (args.port, args.log_interval_s, args.host) == (8000, 2.0, "127.0.0.1")
    assert (args.request_timeout_s, args.allowed_origins) == (5.0, ["http://a", "http://b"])
    with pytest.raises(ConfigError, match="of the kind eagle3"):
        check_draft_kind(args, "mtp")
    check_draft_kind(read(tmp_path, text, "--draft", "other"), "mtp")
    assert read(tmp_path, "no-adaptive: false").adaptive is True
    assert isinstance(args, argparse.Namespace) and not vars(args).keys() & ALIASES.keys()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot: 8000", "unknown key prot; did you mean port?"),
        ("adaptive: 3", "adaptive is 3; true or false is needed"),
        ("shape: 4,1,5\nspeculative-num-steps: 3", "contradict each other"),
        ("port: 1\nport: 2", "key given twice: port"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, says):
    """A key that is not read would be a setting that its author believes in."""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert says in str(caught.value)
