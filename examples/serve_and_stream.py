"""Start `toolkit serve`, stream an answer with the `openai` client, and stop the server.

    python examples/serve_and_stream.py
    python examples/serve_and_stream.py --draft runs/my-chats/ckpt --prompt "Name three rivers."

Any program that speaks OpenAI's HTTP API can take the client's place. Needs `pip install openai`. Without a draft head
the server drafts by n-gram lookup.
"""

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", default="runs/smollm2-135m/ckpt", metavar="DIR", help="draft directory")
    parser.add_argument("--target", default="smollm2-135m", metavar="MODEL", help="model to serve without a head")
    parser.add_argument("--prompt", default="Write a short story about a lighthouse and a whale.")
    parser.add_argument("--max-tokens", type=int, default=160)
    args = parser.parse_args()
    model = ["--draft", args.draft]
    if not Path(args.draft).is_dir():
        print(f"no draft head in {args.draft}; n-gram lookup drafts (train a head: examples/train_on_your_chats.py)")
        model = ["--target", args.target, "--draft", "ngram"]

    command = [sys.executable, "-m", "toolkit", "serve", "--port", "0", *model]  # port 0: any free one
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            lines = iter(server.stdout.readline, "")
            ready = next((line for line in lines if line.startswith("ready at ")), None)
            if ready is None:  # the server has printed why
                sys.exit(server.wait())
            print(ready, end="")
            stream_answer(ready.split()[-1], args.prompt, args.max_tokens)
        finally:
            server.send_signal(signal.SIGINT)  # as Ctrl-C


def stream_answer(url: str, prompt: str, max_tokens: int) -> None:
    """Print an answer as it arrives, then what drafting did for it."""
    client = OpenAI(base_url=url, api_key="none")
    began = time.perf_counter()
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        usage = chunk.usage
    seconds, tokens = time.perf_counter() - began, usage.completion_tokens
    drafted = usage.completion_tokens_details.accepted_prediction_tokens
    print(f"\n\n{tokens} tokens in {seconds:.1f} s, {drafted} of them drafted")
    drafting = usage.speculative  # toolkit's addition to OpenAI's fields
    if drafting["accept_length"] is None:
        print("nothing was drafted")
        return
    print(f"accept_length {drafting['accept_length']} in {drafting['verify_steps']} verify steps: {drafting['shape']}")


if __name__ == "__main__":
    main()
