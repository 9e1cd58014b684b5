"""Best-first draft trees for given heads, from walks over the target's own text.

The target continues some prompts by sampling; at every position of what it wrote, the heads rank
the tokens that really came next, and `vllm_medusa.tree.search` grows the tree on them. Use other
prompts than those measured afterwards.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.prompts import load_prompts
from vllm_medusa.heads import MedusaHeads, load_heads
from vllm_medusa.tree.search import walked_tree

MAX_RANK = 10


@torch.inference_mode()
def observed_ranks(
    model: Any,  # a transformers causal LM
    heads: MedusaHeads,
    prompts: list[list[int]],
    max_new_tokens: int,
    temperature: float,
    samples: int,
) -> list[Tensor]:
    """Rank of the token that came next in every head's logits: int64 [T, K] a text.

    Each prompt is continued `samples` times. A position counts if all K tokens the heads foresee
    there were written, up to the end of the text.
    """
    lm_head = model.get_output_embeddings()
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    torch.manual_seed(0)
    rows = []
    for ids in tqdm(prompts, desc="ranks", unit="prompt"):
        texts = model.generate(
            torch.tensor([ids]),
            max_new_tokens=max_new_tokens,
            num_return_sequences=samples,
            do_sample=True,
            temperature=temperature,
            top_k=0,
        )
        hidden = model(texts, output_hidden_states=True).hidden_states[-1]  # [S, L, H]
        for text, states in zip(texts[:, len(ids) :], hidden[:, len(ids) - 1 :], strict=True):
            stop = next((i + 1 for i, token in enumerate(text.tolist()) if token in ends), None)
            if len(text[1:stop]) < heads.num_heads:
                continue
            nexts = text[1:stop].unfold(0, heads.num_heads, 1)  # [T, K], heads skip one token
            logits = heads.compute_logits(heads(states[: len(nexts)]), lm_head)  # [T, K, V]
            own = logits.gather(2, nexts[..., None])
            rows.append((logits > own).sum(-1))
    return rows


def main() -> None:
    """Command line: writes the tree's paths, best first, and the tau of every prefix."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("heads", type=Path)
    parser.add_argument("prompts", type=Path, help="JSON lines with turns or a prompt")
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first prompts")
    parser.add_argument("--limit", type=int, default=64, help="prompts to use")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--samples", type=int, default=16, help="continuations of each prompt")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--num-draft-tokens", type=int, default=63)
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).eval()
    heads, _ = load_heads(
        arguments.heads,
        hidden_size=model.config.hidden_size,
        vocab_size=model.config.vocab_size,
        dtype=torch.float32,
    )
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    prompts = load_prompts(arguments.prompts, tokenizer, arguments.skip, arguments.limit, 256)
    ranks = observed_ranks(
        model,
        heads,
        prompts,
        arguments.max_new_tokens,
        arguments.temperature,
        arguments.samples,
    )
    paths, taus = walked_tree([row.numpy() for row in ranks], arguments.num_draft_tokens, MAX_RANK)
    everything = torch.cat(ranks)
    document = {
        "tree": paths,
        "source": {
            "tokens_per_step": [round(tau, 4) for tau in taus],
            "top1": [round(float(share), 4) for share in (everything == 0).double().mean(0)],
            "positions": len(everything),
            "temperature": arguments.temperature,
        },
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document) + "\n")
    for size in (1, 4, 7, 10, 14, 22, 32, 63):
        if size <= len(paths):
            print(f"{size:3} draft nodes: expected tau {taus[size - 1]:.3f}")


if __name__ == "__main__":
    main()
