"""The oracle equals plain decoding, token for token, and breaking any part of it is detected.

The models are chaotic (large random weights), because a model that loops hides wrong KV. Random
heads accept almost nothing, so `PlantedHeads` know the target's continuation.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from vllm_medusa import kv, sampler
from vllm_medusa.config import AcceptanceConfig
from vllm_medusa.decode import DecodeResult, decode
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.sampler import draw_exponential, draw_splitmix, truncate_logits
from vllm_medusa.tree import TokenTree

VOCAB, HIDDEN = 199, 32
SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
WINDOW = 9  # shorter than every sequence here, and separates nodes of one tree
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen2_sliding": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    ),
    "mistral_sliding": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, sliding_window=WINDOW, query_pre_attn_scalar=8)
    ),
}
TREE = TokenTree.dense([3, 3, 2, 2])  # 58 draft nodes


def build(name: str, attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    model.set_attn_implementation(attention)
    return model


@pytest.fixture(scope="module")
def llama():
    return build("llama")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def prompt(seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, (7,), generator=seeded(seed))


@torch.inference_mode()
def plain(
    model,
    input_ids,
    steps,
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    generator=None,
    draw=draw_exponential,
):
    """Decode token by token: (``steps`` tokens, hidden states [steps, H] that produced them)."""
    cache = DynamicCache(config=model.config)
    step, tokens, states = input_ids[None], [], []
    for _ in range(steps):
        out = model(step, past_key_values=cache, output_hidden_states=True)
        logits = out.logits[0, -1]
        if temperature:
            logits = truncate_logits(logits[None] / temperature, top_k, top_p)[0]
            token = draw(logits, generator)
        else:
            token = logits.argmax()
        tokens.append(int(token))
        states.append(out.hidden_states[-1][0, -1])
        step = token.view(1, 1)
    return tokens, torch.stack(states)


class PlantedHeads:
    """Heads with planted continuations: head h gives the right token the rank ``ranks[t][h]``.

    The input state is looked up among those of the plain run; for any other state, such as that
    of the wrong node, they are random. A rank beyond the tree's width is a miss.
    """

    token_map = None
    vocab_size = VOCAB

    def __init__(self, tokens: list[int], states: Tensor, misses: int = 1, seed: int = 0) -> None:
        self.tokens, self.states = tokens, states
        rng = random.Random(seed)
        self.ranks = [[rng.randrange(2 + misses) for _ in range(8)] for _ in tokens]

    def __call__(self, hidden_states: Tensor, num_heads: int) -> Tensor:
        return hidden_states.unsqueeze(1).expand(-1, num_heads, -1)

    def compute_logits(self, x: Tensor, lm_head: object) -> Tensor:
        distance = (self.states - x[0, 0]).norm(dim=1)  # [T]
        t = int(distance.argmin())
        logits = torch.randn(1, x.shape[1], VOCAB, generator=seeded(t))
        known = self.tokens[t + 1 :] if distance[t] < 1e-2 else []
        for head, token in enumerate(known[: x.shape[1]]):
            rank, top = self.ranks[t][head], logits[0, head].max()
            logits[0, head, [i for i in range(VOCAB) if i != token][:rank]] = top + 1
            logits[0, head, token] = top + 0.5
        return logits


class Wrapped:
    """A model whose arguments of every tree pass are recorded, or changed, by ``change``."""

    def __init__(self, model: Any, change: Callable[[dict], None]) -> None:
        self.model, self.change = model, change

    def __call__(self, input_ids: Tensor, **arguments: Any) -> Any:
        if "position_ids" in arguments:
            self.change(arguments)
        return self.model(input_ids, **arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def check_counts(result: DecodeResult, requested: int, depth: int) -> None:
    emitted = 1 + sum(accepted + 1 for accepted in result.accepted_per_step)
    assert requested <= emitted <= requested + depth
    assert max(result.accepted_per_step) <= depth


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_plain_greedy(name, attention):
    model = build(name, attention)
    tokens, states = plain(model, prompt(), 90)
    assert len(set(tokens[:80])) > 25, "the model loops, so the test would be meaningless"
    heads = PlantedHeads(tokens, states)
    result = decode(model, heads, TREE, prompt(), 80)
    assert result.token_ids == tokens[:80]
    check_counts(result, 80, TREE.max_depth)
    # Equality matters for long acceptances along branches other than the first.
    assert max(result.accepted_per_step) >= 3
    assert len(result.accepted_per_step) < 50


@pytest.mark.parametrize("draw", [draw_exponential, draw_splitmix])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 0.9), (1.3, 20, 1.0), (1.0, 9, 0.6)]
)
def test_lossless_sampling_equals_plain_sampling(llama, temperature, top_k, top_p, draw):
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "draw": draw}
    for seed in range(3):
        tokens, states = plain(llama, prompt(), 50, **options, generator=seeded(seed))
        heads = PlantedHeads(tokens, states)
        result = decode(llama, heads, TREE, prompt(), 40, **options, generator=seeded(seed))
        assert result.token_ids == tokens[:40]
        assert max(result.accepted_per_step) >= 2


def test_length_limits_truncate_anywhere(llama):
    tokens, states = plain(llama, prompt(), 40)
    heads = PlantedHeads(tokens, states, misses=0)
    for limit in range(1, 14):
        result = decode(llama, heads, TREE, prompt(), limit)
        assert result.token_ids == tokens[:limit]
        assert (result.accepted_per_step == []) == (limit == 1)
        # An end token accepted in the same step, but after the limit, changes nothing.
        late = decode(llama, heads, TREE, prompt(), limit, eos_token_id=tokens[limit + 1])
        assert late.token_ids == tokens[:limit] or tokens[limit + 1] in tokens[:limit]


def test_end_tokens_truncate_anywhere_and_the_whole_step_is_counted(llama):
    tokens, states = plain(llama, prompt(), 60)
    heads = PlantedHeads(tokens, states, misses=0)
    free = decode(llama, heads, TREE, prompt(), 40)
    for end in range(20):
        if tokens[end] in tokens[:end]:
            continue
        for eos in (tokens[end], [VOCAB + 1, tokens[end]]):
            result = decode(llama, heads, TREE, prompt(), 40, eos_token_id=eos)
            assert result.token_ids == tokens[: end + 1]
            steps = len(result.accepted_per_step)
            assert result.accepted_per_step == free.accepted_per_step[:steps]


def test_near_max_model_len_only_drafts_that_fit_are_scored(llama):
    tokens, states = plain(llama, prompt(), 40)
    heads = PlantedHeads(tokens, states, misses=0)
    seen = []
    base = Wrapped(
        llama,
        lambda a: seen.append((a["past_key_values"].get_seq_length(), a["position_ids"].shape[1])),
    )
    for length in range(9, 24):
        seen.clear()
        result = decode(base, heads, TREE, prompt(), 99, max_model_len=length)
        assert result.token_ids == tokens[: length - 7]
        assert all(start + nodes <= length - 1 for start, nodes in seen)
        assert any(nodes < TREE.num_nodes for _, nodes in seen)
        drafting = [nodes for _, nodes in seen if nodes > 1]
        assert len(result.accepted_per_step) == len(drafting)  # steps without drafts do not count


def test_a_full_context_is_an_error(llama):
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        decode(llama, PlantedHeads([1], torch.zeros(1, HIDDEN)), TREE, prompt(), 0)
    with pytest.raises(ValueError, match="the prompt has 7 tokens; raise"):
        decode(llama, PlantedHeads([1], torch.zeros(1, HIDDEN)), TREE, prompt(), 5, max_model_len=7)


@torch.inference_mode()
def brute_force_typical(model, heads, tree, context, root, config, temperature, generator):
    """One step without cache, mask or batch: (accepted tokens, final token)."""
    state = model(torch.tensor([context]), output_hidden_states=True).hidden_states[-1][:, -1]
    logits = heads.compute_logits(heads(state, tree.max_depth), model.lm_head)[0]  # [K, V]
    ranked = logits.argsort(-1, True)
    best = (0, 0.0, [])
    kept = {(): 0.0}
    for path in tree.paths:
        if path[:-1] not in kept:
            continue
        drafts = [int(ranked[head, rank]) for head, rank in enumerate(path)]
        row = model(torch.tensor([[*context, root, *drafts[:-1]]])).logits[0, -1] / temperature
        log_p = row.log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum()
        p = log_p[drafts[-1]]
        if p.exp() > torch.minimum(torch.tensor(config.epsilon), config.delta * (-entropy).exp()):
            kept[path] = kept[path[:-1]] + float(p)
            if (len(path), kept[path]) > best[:2] or best[0] == 0:
                best = (len(path), kept[path], drafts)
    row = model(torch.tensor([[*context, root, *best[2]]])).logits[0, -1]
    final = row.argmax() if config.greedy_root else draw_exponential(row / temperature, generator)
    return best[2], int(final)


@pytest.mark.parametrize("greedy_root", [False, True])
def test_typical_equals_brute_force(llama, greedy_root):
    config = AcceptanceConfig(mode="typical", epsilon=0.03, delta=1.0, greedy_root=greedy_root)
    tree, temperature = TokenTree.dense([3, 2, 2]), 2.5  # flat enough to accept about half
    torch.manual_seed(4)
    heads = MedusaHeads(3, 1, HIDDEN, VOCAB, num_lm_heads=0)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    options = {"acceptance": config, "temperature": temperature}
    result = decode(llama, heads, tree, prompt(), 25, **options, generator=seeded(1))
    generator = seeded(1)
    context = prompt().tolist()
    with torch.inference_mode():
        row = llama(torch.tensor([context])).logits[0, -1] / temperature
    out = [int(draw_exponential(row, generator))]
    accepted = []
    while len(out) < 25:
        drafts, final = brute_force_typical(
            llama, heads, tree, context + out[:-1], out[-1], config, temperature, generator
        )
        out += [*drafts, final]
        accepted.append(len(drafts))
    assert result.token_ids == out[:25]
    assert result.accepted_per_step == accepted
    assert {0, 1, 3} <= set(accepted)


# Negative controls: each breaks one part, which must break equality too.


def run_broken(model: Any) -> tuple[int, int]:
    """Number of 8 prompts with other tokens than plain decoding, and the steps taken."""
    wrong = steps = 0
    for seed in range(8):
        tokens, states = plain(build("llama"), prompt(seed), 50)
        heads = PlantedHeads(tokens, states, misses=0)
        result = decode(model, heads, TREE, prompt(seed), 40)
        wrong += result.token_ids != tokens[:40]
        steps += len(result.accepted_per_step)
    return wrong, steps


def test_control_unbroken(llama):
    assert run_broken(llama) == (0, 8 * 8)  # 1 token from the prompt, then 5 from every step


def test_control_no_compaction(llama, monkeypatch):
    monkeypatch.setattr(kv, "copy_slots", lambda *_: None)
    assert run_broken(llama)[0] >= 7


def test_control_causal_instead_of_tree_mask(llama):
    def causal(arguments):
        mask = arguments["attention_mask"]
        n, length = mask.shape[-2:]
        low = torch.finfo(mask.dtype).min
        arguments["attention_mask"] = torch.full_like(mask, low).triu(length - n + 1)

    assert run_broken(Wrapped(llama, causal))[0] >= 7


def test_control_positions_by_slot(llama):
    def by_slot(arguments):
        positions = arguments["position_ids"]
        arguments["position_ids"] = positions[:, :1] + torch.arange(positions.shape[1])

    assert run_broken(Wrapped(llama, by_slot))[0] >= 7


def test_control_hidden_state_of_the_wrong_node(llama, monkeypatch):
    """A chain's rule, last node = number accepted: right tokens, but every other draft is lost.

    Not more, because a step that accepts nothing continues from the root, which is the right node.
    """
    judge = sampler.greedy_verdict

    def chain_rule(*arguments):
        verdict = judge(*arguments)
        path = dataclasses.replace(verdict.path, last_node=verdict.path.num_accepted)
        return dataclasses.replace(verdict, path=path)

    monkeypatch.setattr(sampler, "greedy_verdict", chain_rule)
    wrong, steps = run_broken(llama)
    assert wrong == 0
    assert steps > 8 * 12


def test_control_an_additional_draw(llama):
    """A sampler that also draws for rejected levels diverges from the plain run's random stream."""
    options = {"temperature": 1.0}
    tokens, states = plain(llama, prompt(), 50, **options, generator=seeded(0))

    def wasteful(logits, generator):
        token = draw_exponential(logits, generator)
        torch.rand(1, generator=generator)
        return token

    heads = PlantedHeads(tokens, states)
    options |= {"generator": seeded(0), "draw": wasteful}
    result = decode(llama, heads, TREE, prompt(), 40, **options)
    assert result.token_ids != tokens[:40]
