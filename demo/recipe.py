"""Every number of the demo's recipe in one place; `demo.build` scales them with `--tokens`."""

from dataclasses import dataclass

BOS, EOS, PAD = "<s>", "</s>", "<pad>"  # ids 0, 1, 2


@dataclass(frozen=True)
class CorpusRecipe:
    """Which Python files become text, and which of them stay held out."""

    min_bytes: int = 256
    max_bytes: int = 200_000  # larger ones are mostly generated tables
    heldout_every: int = 64  # a file is held out when its digest is 0 modulo this
    heldout_tokens: int = 120_000
    tokenizer_bytes: int = 24_000_000


@dataclass(frozen=True)
class TargetRecipe:
    """The base model: a 4-layer Llama with tied embeddings."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 2048
    tokens: int = 15_000_000
    batch_size: int = 8
    context: int = 384
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0


@dataclass(frozen=True)
class HeadsRecipe:
    """Medusa-1 heads on text that the target writes; what is not here is `train`'s default."""

    num_heads: int = 5
    num_layers: int = 3
    tokens: int = 2_400_000  # of texts to train on
    temperatures: tuple[float, ...] = (0.6, 0.8, 0.8, 1.0)  # of the texts of each prompt
    prompt_tokens: tuple[int, int] = (8, 96)  # bounds of what is cut out of the source
    max_tokens: int = 288  # of each text
    epochs: int = 3
    batch_tokens: int = 768
    learning_rate: float = 5e-3
    tree_draft_tokens: int = 12
    tree_temperature: float = 0.8  # of the texts that the tree is chosen on
    heldout_prompts: int = 256
