import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.assets import HEADS
from support.commands import run
from support.fake_engine import FakeProcess

from vllm_medusa.offline import generate


class Engine(FakeProcess):
    """Replaces `EngineProcess`; records its arguments, and may be interrupted."""

    def __init__(self, settings, sampling, **options):
        super().__init__(max_tokens=6, step_sizes=self.sizes, longest_prompt=self.limit)
        self.built.append((settings, sampling, options))

    def step(self):
        if self.steps_left is not None:
            type(self).steps_left -= 1
            if not self.steps_left:
                raise KeyboardInterrupt
        deltas = super().step()
        return [replace(d, finish_reason=d.finish_reason and self.ends_by) for d in deltas]


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """Names such as "target" are not looked up."""
    monkeypatch.setattr("vllm_medusa.cli.find_models", lambda *_: None)


@pytest.fixture
def heads(tmp_path):
    """The test model's heads, in a writable folder."""
    return Path(shutil.copytree(HEADS, tmp_path / "heads"))


@pytest.fixture
def command(capsys, monkeypatch):
    """Run a command: its exit status, standard output and standard error."""

    def ran(*words):
        monkeypatch.setattr("sys.argv", ["vllm-medusa", *map(str, words)])
        return run(*words), *capsys.readouterr()

    return ran


@pytest.fixture
def engine(monkeypatch):
    """The class of all engines; attributes set on it apply to engines created later."""
    more = {"built": [], "limit": 10_000, "sizes": (2, 1), "steps_left": None, "ends_by": "stop"}
    made = type("Engine", (Engine,), more)
    monkeypatch.setattr(generate, "EngineProcess", made)
    return made
