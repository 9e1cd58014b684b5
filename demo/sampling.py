"""Text that the target writes itself: what the heads will have to predict when they are used."""

import numpy as np
import torch
from torch import Tensor
from tqdm import trange
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from demo.corpus import BuildError
from demo.recipe import HeadsRecipe


def top_level_starts(
    tokens: np.ndarray, tokenizer: PreTrainedTokenizerBase, length: int
) -> np.ndarray:
    """Return the positions of `tokens` [T] where an unindented line starts, `length` before T.

    A prompt cut there looks like one that a person would write: it begins with code.
    """
    pieces = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    ends_line = np.array([piece.endswith("\n") for piece in pieces])
    starts_code = np.array(
        [piece[:1].isidentifier() or piece.startswith(("@", "#", '"', "'")) for piece in pieces]
    )
    hit = ends_line[tokens[:-1]] & starts_code[tokens[1:]]
    positions = np.flatnonzero(hit[: max(0, len(tokens) - length)]) + 1
    if len(positions) == 0:
        raise BuildError("no unindented line among the tokens; give more source text")
    return positions


@torch.no_grad()
def sample_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: np.ndarray,  # [T] uint16 source text that the prompts are cut from
    num_rows: int,
    recipe: HeadsRecipe,
    *,
    temperatures: tuple[float, ...],
    seed: int,
    label: str = "sample",
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Let the target continue source prefixes at mixed temperatures.

    Returns ids uint16 [R, context] that start with `<s>`, the prompt lengths int64 [R] (`<s>`
    included) and the temperatures float32 [R]. A row goes on through `</s>` into the next text.
    """
    generator = torch.Generator().manual_seed(seed)
    shortest, longest = recipe.prompt_tokens
    starts = top_level_starts(tokens, tokenizer, longest)
    done: list[tuple[Tensor, int, Tensor]] = []
    for first in trange(0, num_rows, recipe.sample_batch, desc=label, unit="batch"):
        count = min(recipe.sample_batch, num_rows - first)
        length = int(torch.randint(shortest, longest + 1, (1,), generator=generator))
        at = torch.randint(len(starts), (count,), generator=generator).numpy()
        cut = tokens[starts[at][:, None] + np.arange(length)]  # [count, length]
        ids = torch.from_numpy(cut.astype(np.int64))
        ids = torch.cat([ids.new_full((count, 1), tokenizer.bos_token_id), ids], dim=1)
        temperature = torch.tensor([temperatures[i % len(temperatures)] for i in range(count)])
        cache, new = None, ids
        while ids.shape[1] < recipe.context:
            out = model(new, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            probs = (out.logits[:, -1].float() / temperature[:, None]).softmax(-1)  # [count, V]
            new = torch.multinomial(probs, 1, generator=generator)
            ids = torch.cat([ids, new], dim=1)
        done.append((ids, length + 1, temperature))
    return (
        torch.cat([ids for ids, _, _ in done]).numpy().astype(np.uint16),
        np.concatenate([np.full(len(ids), length) for ids, length, _ in done]),
        torch.cat([temperature for _, _, temperature in done]).numpy(),
    )
