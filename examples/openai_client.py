"""Stream from a served model with the official `openai` client.

Start a server, for example with the test model (`make serve-example`), then:

    python examples/openai_client.py
"""

from __future__ import annotations

import argparse

from openai import APIConnectionError, NotFoundError, OpenAI


def main() -> None:
    """Stream a completion and a chat answer."""
    parser = argparse.ArgumentParser(
        description="Stream from an OpenAI-compatible server.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--base-url", default="http://localhost:8000/v1", help="ends with /v1")
    parser.add_argument("--prompt", default="<s>def fibonacci(n):\n", help="for both requests")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each answer")
    args = parser.parse_args()
    client = OpenAI(base_url=args.base_url, api_key="not needed")
    try:
        model = client.models.list().data[0].id
    except (APIConnectionError, NotFoundError) as error:
        parser.exit(1, f"No server answers at {args.base_url}: {error} Pass its --base-url.\n")

    print("--- completion\n" + args.prompt, end="")
    for part in client.completions.create(
        model=model, prompt=args.prompt, max_tokens=args.max_tokens, temperature=0, stream=True
    ):
        print(part.choices[0].text, end="", flush=True)

    print("\n--- chat")
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": args.prompt.removeprefix("<s>")}],
        max_tokens=args.max_tokens,
        temperature=0,
        stream=True,
    ):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
