from typing import Any

import pytest
from support.fake_engine import FakeEngine

from demo import __main__ as demo


class Engine(FakeEngine):
    """Stands in for `VllmEngine`; wrong only when it speculates and is told to be."""

    error: int | None = None

    def __init__(self, settings: Any, sampling: Any, **_: Any):
        super().__init__(max_tokens=20, step_sizes=(3, 1) if settings.speculative_config else (1,))
        self.wrong_at = self.error if settings.speculative_config else None

    def submit(self, key: str, prompt: str | list[int], seed: int | None) -> None:
        self.prompts.pop(key, None)
        super().submit(key, prompt, seed)

    def pieces(self, token_ids: list[int]) -> list[str]:
        return [f"{t} " for t in token_ids]

    def close(self) -> None:
        pass


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "VllmEngine", Engine)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n' * 5)
    for name in ("target", "heads"):
        (tmp_path / name).mkdir()
    target, heads, prompts = (str(tmp_path / n) for n in ("target", "heads", "prompts.jsonl"))
    return ["--target", target, "--heads", heads, "--prompts", prompts]


def test_equal_tokens_end_with_success(arguments, capsys):
    assert demo.main(arguments) == 0
    shown = capsys.readouterr().out
    for words in ("IDENTICAL", "sampled, batch 1", "greedy, batch 1", "ratio", "accepted draft"):
        assert words in shown


def test_a_wrong_token_ends_with_failure(arguments, monkeypatch, capsys):
    monkeypatch.setattr(Engine, "error", 3)
    assert demo.main(arguments) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_what_is_missing_is_named(arguments, tmp_path, capfd):
    (tmp_path / "heads").rmdir()
    assert demo.main(arguments) == 2
    error = capfd.readouterr().err
    assert "heads does not exist" in error
    assert "--heads" in error
