"""Compare the speed of a running server with and without drafts.

    python examples/server_gain.py prompts.jsonl --concurrency 4

Each round sends all prompts twice, without drafts (`max_draft_tokens: 0`, which decodes as plain
vLLM does) and with drafts. After the first round, prompts are in the server's prefix cache, so
their prefills take almost no time. Use a server that has no other load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openai import APIConnectionError, APIStatusError, NotFoundError, OpenAI

from vllm_medusa.offline.prompts import Prompt, load_prompts

WITHOUT = {"vllm_xargs": {"medusa": json.dumps({"max_draft_tokens": 0})}}


def positive(text: str) -> int:
    """An integer above 0."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return int(text)


def main() -> None:
    """Send the prompts without and with drafts, alternating; print the speeds."""
    parser = argparse.ArgumentParser(
        description="Measure a server's speed with and without drafts.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("prompts", type=Path, help="a file as for `vllm-medusa generate`")
    parser.add_argument("--base-url", default="http://localhost:8000/v1", help="ends with /v1")
    parser.add_argument("--concurrency", type=positive, default=1, help="requests at a time")
    parser.add_argument("--limit", type=positive, default=12, help="number of prompts")
    parser.add_argument("--max-tokens", type=positive, default=96, help="of each answer")
    parser.add_argument("--rounds", type=positive, default=3, help="after one round to warm up")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    try:
        prompts = load_prompts(args.prompts)[: args.limit]
    except (ValueError, OSError) as error:
        parser.error(str(error))
    client = OpenAI(base_url=args.base_url, api_key="not needed")
    try:
        model = client.models.list().data[0].id
    except (APIConnectionError, NotFoundError) as error:
        parser.exit(1, f"No vLLM server at --base-url {args.base_url} ({error}).\n")

    def answer(prompt: Prompt, extra: Mapping[str, object]) -> tuple[str, int]:
        """The text and the number of tokens of an answer."""
        options: dict[str, Any] = {
            "model": model,
            "max_tokens": args.max_tokens,
            "temperature": args.temperature,
            "extra_body": extra,
        }
        if prompt.turns:
            options["messages"] = [*prompt.history, {"role": "user", "content": prompt.turns[0]}]
            chat = client.chat.completions.create(**options)
            return chat.choices[0].message.content or "", chat.usage.completion_tokens
        options["prompt"] = list(prompt.token_ids) if prompt.text is None else prompt.text
        done = client.completions.create(**options)
        return done.choices[0].text, done.usage.completion_tokens

    def run(extra: Mapping[str, object]) -> tuple[float, list[str]]:
        """Tokens per second of a pass over all prompts, and their answers."""
        start = time.perf_counter()
        with ThreadPoolExecutor(args.concurrency) as pool:
            answers = list(pool.map(lambda prompt: answer(prompt, extra), prompts))
        seconds = time.perf_counter() - start
        return sum(tokens for _, tokens in answers) / seconds, [text for text, _ in answers]

    ratios = []
    for number in range(args.rounds + 1):
        try:
            (without, texts), (drafted, drafted_texts) = run(WITHOUT), run({})
        except (APIConnectionError, APIStatusError) as error:
            parser.exit(1, f"The server did not answer a request: {error}\n")
        except KeyboardInterrupt:
            parser.exit(130, "interrupted\n")
        name = f"round {number}" if number else "warm-up"
        print(f"{name}: {without:.1f} tokens/s without drafts, {drafted:.1f} with them", flush=True)
        if number:
            ratios.append(drafted / without)
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"{statistics.median(ratios):.2f}x with drafts (median of {args.rounds}; {spread})")
    if args.temperature == 0:
        equal = sum(a == b for a, b in zip(texts, drafted_texts, strict=True))
        print(f"{equal} of {len(texts)} answers of the last round are the same text")


if __name__ == "__main__":
    main()
