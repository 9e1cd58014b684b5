import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import chat
from support.fake_engine import FakeEngine

from vllm_medusa import cli
from vllm_medusa.offline import generate
from vllm_medusa.offline.records import load_records
from vllm_medusa.offline.results import ResultLog
from vllm_medusa.training import distill


class Engine(FakeEngine):
    """Stands in for `VllmEngine`; remembers what it was built from."""

    built: list[Any]
    limit = 10_000
    steps_left: int | None = None
    ends_by = "stop"

    def __init__(self, settings: Any, sampling: Any, **options: Any):
        super().__init__(max_tokens=6, longest_prompt=self.limit)
        self.built.append((settings, sampling, options))

    def step(self) -> Any:
        if self.steps_left is not None:
            type(self).steps_left -= 1  # type: ignore[operator]
            if not self.steps_left:
                raise KeyboardInterrupt
        deltas = super().step()
        return [replace(d, finish_reason=d.finish_reason and self.ends_by) for d in deltas]

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    monkeypatch.setenv(name, os.environ.get(name, "0"))
    monkeypatch.setattr(generate, "VllmEngine", Engine)
    monkeypatch.setattr(Engine, "built", [], raising=False)
    monkeypatch.setattr(Engine, "limit", 10_000)
    monkeypatch.setattr(Engine, "steps_left", None)
    return Engine


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": "p0", "turns": ["a", "b"]}, *({"prompt": f"text {i}"} for i in range(5))]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit:
        cli.main(["distill", "target", *map(str, arguments)])
    return int(exit.value.code or 0)


def lines(path: Path) -> list[dict[str, Any]]:
    return sorted(map(json.loads, path.read_bytes().splitlines()), key=lambda r: r["index"])


def test_records_and_what_they_come_from(
    prompts: Path, tmp_path: Path, engine: type[Engine], capfd: Any
) -> None:
    out = tmp_path / "r.jsonl"
    options = ("--samples", 3, "--temperature", "0.5,1.0", "--seed", 9, "--top-p", 0.9)
    assert run("-i", prompts, "-o", out, *options, "--max-tokens", 50) == 0
    records, bad = load_records(out)
    assert bad == [] and len(records) == 21
    assert [r.request_id for r in records[1:8:2]] == ["p0#0", "p0#1", "p0#2", "1#1"]
    assert [r.temperature for r in records[1:8:2]] == [0.5, 1.0, 0.5, 1.0]
    assert [r.index for r in records[:8]] == [0, 1, 2, 3, 4, 5, 6, 8], "two indices a text"
    ((settings, sampling, extra),) = engine.built
    assert settings.speculative_config is None and extra["seeded"] is True
    assert (sampling.max_tokens, sampling.top_p, sampling.ignore_eos) == (50, 0.9, False)
    generated = sum(r.num_generated for r in records)
    total = sum(len(r.token_ids) for r in records)
    said = " ".join(capfd.readouterr().err.split())
    assert f"21 records: {total - generated} prompt tokens, {generated} generated" in said
    manifest = json.loads((tmp_path / "r.jsonl.manifest.json").read_text())
    assert manifest["provenance"]["data"][0]["file"] == "prompts.jsonl"
    assert manifest["settings"]["texts"] == {
        "samples": 3,
        "temperatures": [0.5, 1.0],
        "self_talk": False,
        "turns": 2,
    }


def test_an_interrupted_job_goes_on_to_the_same_records(
    prompts: Path, tmp_path: Path, engine: type[Engine], capfd: Any
) -> None:
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    options = ("-i", prompts, "--samples", 2, "--batch", 3)
    assert run(*options, "-o", whole) == 0
    engine.steps_left = 8
    assert run(*options, "-o", broken) == 130
    assert 0 < len(lines(broken)) < len(lines(whole))
    with broken.open("ab") as file:
        file.write(b'{"index": 5, "tor')
    engine.steps_left = None
    assert run(*options, "-o", broken) == 0
    said = capfd.readouterr().err
    assert "resuming: " in said and "cut off an unfinished last line (17 bytes)" in said
    assert lines(broken) == lines(whole)
    content = broken.read_bytes()
    assert run(*options, "-o", broken) == 0
    assert "nothing to do" in capfd.readouterr().err and broken.read_bytes() == content


def test_a_divided_conversation_is_whole_after_a_kill_between_its_lines(
    prompts: Path, tmp_path: Path
) -> None:
    """Without a chat template the fake engine's answers read otherwise in the next prompt."""
    out = tmp_path / "r.jsonl"
    assert run("-i", prompts, "-o", out, "--batch", 1) == 0
    whole = lines(out)
    assert [r["request_id"] for r in whole].count("p0") == 2
    content = out.read_bytes().splitlines(keepends=True)
    assert [json.loads(line)["index"] for line in content[:2]] == [1, 0]
    out.write_bytes(content[0])
    assert run("-i", prompts, "-o", out, "--batch", 1) == 0
    assert lines(out) == whole


@pytest.mark.parametrize("change", [("--samples", 3), ("--temperature", 0.6), ("--seed", 1)])
def test_other_settings_refuse_the_output(
    prompts: Path, tmp_path: Path, change: tuple[object, ...], capfd: Any
) -> None:
    options = ("-i", prompts, "-o", tmp_path / "r.jsonl")
    assert run(*options, "--samples", 2) == 0
    assert run(*options, "--samples", 2, *change) == 2
    assert "holds results of other settings" in capfd.readouterr().err


def test_a_file_read_otherwise_is_another_job(prompts: Path, tmp_path: Path, capfd: Any) -> None:
    options = ("-i", prompts, "-o", tmp_path / "r.jsonl")
    assert run(*options, "--format", "text") == 0
    assert run(*options) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert "format was 'text' and is now None" in said
    assert run("-i", prompts, "-o", tmp_path / "auto.jsonl") == 0
    assert run("-i", prompts, "-o", tmp_path / "auto.jsonl", "--format", "jsonl") == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--samples", "2", "--temperature", "0"], "2 times the same text"),
        (["--samples", "3", "--temperature", "0,0.7"], "2 times the same text at temperature 0"),
        (["--tree", "mc_sim_7b_63"], "need heads"),
        (["--samples", "999999999999999"], "use a whole number from 1 to 10000"),
        (["--turns", "2"], "is of --self-talk"),
        (["--temperature", "0.5,-1"], "'-1' is not allowed"),
        (["--temperature", ""], "'' is not allowed"),
        (["--seed", "-1"], "'-1' is not allowed; use a whole number from 0 to 4294967295"),
        (["--acceptance", "typical"], "unrecognized arguments"),
    ],
)
def test_contradictions_are_refused(
    prompts: Path, tmp_path: Path, options: list[str], message: str, engine: Any, capfd: Any
) -> None:
    assert run("-i", prompts, "-o", tmp_path / "r.jsonl", *options) == 2
    assert message in " ".join(capfd.readouterr().err.split())
    assert engine.built == [] and not (tmp_path / "r.jsonl").exists()


def test_prompts_that_can_not_be_run(
    prompts: Path, tmp_path: Path, engine: type[Engine], capfd: Any
) -> None:
    prompts.write_text(prompts.read_text() + json.dumps({"prompt": "x" * 99}) + "\n")
    engine.limit = 20
    options = ("-i", prompts, "-o", tmp_path / "r.jsonl", "--batch", 1)
    assert run(*options) == 2
    assert "line 7: the prompt has 99 tokens" in capfd.readouterr().err
    assert run(*options, "--on-bad-line", "skip") == 1
    records, bad = load_records(tmp_path / "r.jsonl")
    assert len(records) == 7
    assert [b.reason for b in bad] == ["no record, but an error: the prompt has 99 tokens"]


def test_self_talk_needs_a_template_before_an_engine(
    prompts: Path, tmp_path: Path, engine: type[Engine], capfd: Any
) -> None:
    options = ("-i", prompts, "-o", tmp_path / "r.jsonl", "--self-talk")
    with pytest.raises(SystemExit) as exit:
        cli.main(["distill", str(chat.DEMO), *map(str, options)])
    assert exit.value.code == 2
    assert "--self-talk needs a chat template" in capfd.readouterr().err
    assert engine.built == []


def test_self_talk_without_a_tokenizer_is_refused(
    prompts: Path, tmp_path: Path, engine: type[Engine], capfd: Any
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    options = ("-i", prompts, "-o", tmp_path / "r.jsonl", "--self-talk")
    with pytest.raises(SystemExit) as exit:
        cli.main(["distill", str(model), *map(str, options)])
    assert exit.value.code == 2
    assert "--self-talk needs the target's tokenizer" in capfd.readouterr().err
    assert engine.built == []


def test_a_full_disk_is_told(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ResultLog, "append", full)
        assert run("-i", prompts, "-o", tmp_path / "r.jsonl") == 2
    assert "No space left on device" in capfd.readouterr().err
    assert run("-i", prompts, "-o", tmp_path / "r.jsonl") == 0


def test_self_talk_says_that_conversations_ended_early(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: type[Engine], capfd: Any
) -> None:
    monkeypatch.setattr(distill, "_talker", lambda model: chat.tokenizer(chat.CHATML))
    monkeypatch.setattr(engine, "ends_by", "length")
    assert run("-i", prompts, "-o", tmp_path / "r.jsonl", "--self-talk", "--turns", 2) == 0
    said = " ".join(capfd.readouterr().err.split())
    assert "6 of 6 conversations ended before their 2 answers" in said
