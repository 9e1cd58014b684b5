"""Medusa decoding on one screen: batch 1, plain torch and transformers.

    propose -> score -> accept -> compact -> repeat

This is the oracle that every fast path must match. Greedy decoding gives the tokens of plain greedy
decoding; lossless sampling gives those of plain sampling with a generator in the same state.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_medusa import kv, sampler
from vllm_medusa.config import AcceptanceConfig
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.noise import next_seeds, splitmix_gumbel
from vllm_medusa.proposer.steps import propose_tree
from vllm_medusa.tree.batch import TreeBatch
from vllm_medusa.tree.dynamic import DynamicTree
from vllm_medusa.tree.topology import TokenTree

UNLIMITED = 1 << 62


@dataclass(frozen=True)
class DecodeResult:
    """Generated tokens, and accepted drafts per verification step, counted as in vLLM.

    Steps without drafts are not counted; accepted drafts after the end of a truncated output are.
    """

    token_ids: list[int]
    accepted_per_step: list[int]


@torch.inference_mode()
def decode(
    model: Any,  # a transformers causal LM, only attention layers, "sdpa" or "eager"
    heads: MedusaHeads,  # Medusa or Hydra, with the model's embedding bound
    tree: TokenTree | DynamicTree,
    input_ids: Tensor,  # int64 [prompt length]
    max_new_tokens: int,
    *,
    acceptance: AcceptanceConfig | None = None,  # lossless
    temperature: float = 0.0,  # below 1e-5: greedy, as in vLLM
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    eos_token_id: int | Collection[int] | None = None,  # ends the output and is included
    max_model_len: int = UNLIMITED,  # of prompt and output; drafts beyond it are not scored
    draw: sampler.Draw = sampler.draw_exponential,  # draw_splitmix for vLLM's CPU sampler
    shared_noise: bool = True,  # choose drafts with the noise of draw_splitmix, see `noise`
) -> DecodeResult:
    """Continue ``input_ids`` until an end token or a limit.

    Raises:
        ValueError: There is no room for a token, or the model has layers that can't score a tree.

    """
    from transformers import DynamicCache  # takes seconds to import

    limit = min(max_new_tokens, max_model_len - len(input_ids))
    if limit < 1:
        raise ValueError(
            f"No room for a new token: max_new_tokens is {max_new_tokens}, max_model_len "
            f"{max_model_len} and the prompt has {len(input_ids)} tokens; raise a limit."
        )
    rule, greedy, device = acceptance or AcceptanceConfig(), temperature < 1e-5, input_ids.device
    ends = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())

    def shape(logits: Tensor) -> Tensor:  # [R, V] -> fp32 [R, V]
        return sampler.truncate_logits(logits.float() / temperature, top_k, top_p)

    def pick(logits: Tensor) -> Tensor:  # [1, V] -> int64 [1]: plain decoding
        return logits.argmax(-1) if greedy else draw(shape(logits)[0], generator).view(1)

    def judge(batch: TreeBatch, token_ids: Tensor, logits: Tensor) -> sampler.Verdict:
        if greedy:
            return sampler.greedy_verdict(batch, token_ids, logits.argmax(-1)[None])
        if rule.mode == "lossless":
            return sampler.lossless_walk(batch, token_ids, lambda _, n, __: pick(logits[n]))
        probs = shape(logits).softmax(-1)[None]  # [1, n, V]
        epsilon, delta = probs.new_tensor([[rule.epsilon], [rule.delta]])
        path = sampler.typical_path(batch, token_ids, probs, epsilon, delta)
        last = logits[path.last_node]  # [1, V]
        final = last.argmax(-1) if rule.greedy_root else pick(last)
        return sampler.close_path(path, token_ids, final)

    cache = DynamicCache()
    out = model(input_ids[None], past_key_values=cache, output_hidden_states=True, logits_to_keep=1)
    hidden = out.hidden_states[-1][:, -1]  # [1, H], input of the LM head
    root = pick(out.logits[:, -1])  # int64 [1]
    tokens, accepted_per_step = root.tolist(), []
    while len(tokens) < limit and ends.isdisjoint(tokens):
        base = cache.get_seq_length()  # the root's position
        # Propose: head h fills the nodes of depth h + 1 from the state that produced the root.
        useful = limit - len(tokens) - 1  # the step's last token needs no node
        lm_head = model.get_output_embeddings()
        stream = None
        shares = shared_noise and draw is sampler.draw_splitmix and rule.mode == "lossless"
        if shares and not greedy:
            seeds = next_seeds(generator, tree.max_depth)
            stream = _Ahead(seeds[None, :, None], hidden.new_tensor([temperature]).float())
        drafts = propose_tree(heads, hidden, root, tree, lm_head, useful, stream)
        n = min(int(drafts.num_nodes), max_model_len - base - 1)
        batch = drafts.prefix(n).topology(tree.max_depth)
        token_ids = torch.cat([root[None], drafts.token_ids[:, 1:n]], 1)  # int64 [1, n]
        # Score: all nodes in one pass; each attends to the context and its ancestors.
        out = model(
            token_ids,
            attention_mask=_tree_mask(model, batch, base),
            position_ids=base + batch.depths,  # [1, n]
            past_key_values=cache,
            output_hidden_states=True,
        )
        # Accept.
        verdict = judge(batch, token_ids, out.logits[0])
        path, accepted = verdict.path, int(verdict.path.num_accepted)
        # Compact: move the accepted path's keys and values next to the context.
        slots = base + torch.arange(n, device=device)[None]
        src, dst = kv.accepted_moves(slots, path.nodes, path.num_accepted)
        for layer in cache.layers:  # [1, heads, slots, head size] each
            kv.copy_slots(layer.keys, src, dst, 2)
            kv.copy_slots(layer.values, src, dst, 2)
        if rejected := n - 1 - accepted:
            cache.crop(-rejected)
        # Repeat, from the last accepted node.
        hidden, root = out.hidden_states[-1][0, path.last_node], verdict.final_token
        tokens += verdict.output_token_ids[0, : accepted + 1].tolist()
        accepted_per_step += [accepted] * (n > 1)
    end = next((i for i, token in enumerate(tokens, 1) if token in ends), limit)
    return DecodeResult(tokens[: min(end, limit)], accepted_per_step)


@dataclass(frozen=True)
class _Ahead:
    """See `noise.Stream`."""

    seeds: Tensor  # int64 [1, D, 1]
    temperature: Tensor  # fp32 [1]

    def gumbel(self, first: int, stop: int, token_ids: Tensor) -> Tensor:
        return splitmix_gumbel(self.seeds[:, first:stop], token_ids).float()


def _tree_mask(model: Any, tree: TreeBatch, base: int) -> Tensor | dict[str, Tensor]:
    """Additive mask [1, 1, n, base + n], or one per kind of layer; windows count positions."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if other := kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(f"Layers of kind {sorted(other)} can't score a tree; only attention can.")
    window = getattr(config, "sliding_window", None) or UNLIMITED
    query = base + tree.depths[0]  # [n] positions
    key = torch.cat([torch.arange(base, device=query.device), query])  # [base + n]
    full = torch.nn.functional.pad(tree.ancestors[0], (base, 0), value=True)  # [n, base + n]
    sliding = full & (query[:, None] - key < window)
    low = torch.finfo(model.dtype).min
    masks = {
        name: torch.zeros_like(see, dtype=model.dtype).masked_fill(~see, low)[None, None]
        for name, see in (("full_attention", full), ("sliding_attention", sliding))
    }
    if "sliding_attention" in kinds:
        return masks
    return masks["full_attention" if kinds else "sliding_attention"]
