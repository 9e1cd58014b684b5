"""Requirements of an adapt run: tokens and disk, as plain numbers."""

from pathlib import Path

from vllm_medusa.adapt.options import AdaptOptions, DrafterOptions
from vllm_medusa.adapt.plan import count_tokens, disk_bytes
from vllm_medusa.offline.defaults import Length

TARGET = {"hidden_size": 576, "vocab_size": 49152}


def test_answers_fit_the_targets_context() -> None:
    lengths = [Length(100), Length(900, 2)]
    assert count_tokens(lengths, 2, 512, 1000) == (2000, 2 * (512 + 100))


def test_states_are_cached_for_generated_tokens_up_to_the_limit() -> None:
    def disk(prompt_tokens: int, written: int, **more: object) -> tuple[int, int]:
        files = {"prompts": Path("p.jsonl"), "output": Path("heads")}
        options = AdaptOptions(target="target", **files, dtype="bfloat16", **more)
        return disk_bytes(prompt_tokens, written, options, TARGET, 269_000_000)

    files, states = disk(68_000, 136_000)
    assert states == 136_000 * 576 * 2
    assert files < 6e9
    prompts_and_more_layers = disk(68_000, 136_000, heads=DrafterOptions(kind="eagle3"))[1]
    assert prompts_and_more_layers == 204_000 * 4 * 576 * 2
    assert disk(10**8, 10**9)[1] == 50e9
