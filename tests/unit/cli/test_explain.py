"""`explain` on step costs that were learned from made-up servers."""

import os

import numpy as np
import pytest
from PIL import Image
from support.assets import HEADS, TARGET
from support.commands import run, said
from support.serving import CPU

from vllm_medusa.budget.cost import StepCost
from vllm_medusa.budget.store import CostStore, kept_costs
from vllm_medusa.config import vllm_cache
from vllm_medusa.explain import measure
from vllm_medusa.explain.job import expected_loads
from vllm_medusa.heads import peek_heads

OF = {
    "target": TARGET, "heads": HEADS, "revision": "None", "dtype": "torch.float32",
    "quantization": "None", "ranks": "1", "eager": "True", "runner": "V1", "device": "a CPU",
}  # fmt: skip
TAUS = (1.5, 1.8, 2.0, 2.1, 2.2, 2.3, 2.35, 2.4)


def cpu(rows):
    """Cheap rows at first."""
    return 18.0 * float(np.interp(rows, *CPU))


def dear(rows):
    return 3.0 * rows


def learned(base, heads=0.5):
    cost = StepCost(1024)
    for _ in range(20):
        for rows in (1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 512, 1024):
            cost.observe(rows, rows, False, base(rows))
            cost.observe(rows, rows, True, base(rows) + heads)
            for requests in (1, 4, 16, 64):
                if requests < rows:
                    cost.observe(rows, requests, True, base(rows) + heads)
    return cost


@pytest.fixture
def keep(tmp_path):
    """Keep the costs of an engine in a folder; later calls are later engines."""
    times = iter(range(1_000, 2_000))

    def kept(cost=None, **of):
        store = CostStore(tmp_path, OF | of, 1024)
        assert store.save(cost or learned(cpu)) == ""
        os.utime(store.path, (next(times),) * 2)
        return tmp_path

    return kept


def test_less_is_drafted_the_more_requests_there_are():
    loads = expected_loads(learned(cpu), TAUS, 63)
    assert [load.requests for load in loads] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    each = [load.nodes / load.requests for load in loads if load.pays]
    assert each[0] > 3 and each[-1] < 1 and min(each[:3]) > max(each[3:])
    assert [load.pays for load in loads] == [True] * 5 + [False] * 4
    assert loads[0].ratio > 1.4
    for load in loads:
        assert load.plain_ms == pytest.approx(cpu(load.requests), rel=0.1)
        assert load.ms == pytest.approx(cpu(load.requests + load.nodes) + 0.5, rel=0.15)
        assert load.ratio == pytest.approx(load.tokens / load.ms * load.plain_ms / load.requests)


def test_where_rows_are_dear_plain_is_faster():
    assert not any(load.pays for load in expected_loads(learned(dear), TAUS, 63))


def test_steps_end_where_rows_do():
    loads = expected_loads(StepCost(20), TAUS, 63)
    assert [load.requests for load in loads] == [1, 2, 4, 8, 16]
    assert loads[-1].nodes <= 4


def test_a_table_and_a_picture(keep, tmp_path, capfd):
    picture = tmp_path / "explained.png"
    assert run("explain", TARGET, HEADS, "--costs", keep(), "--plot", picture) == 0
    out = capfd.readouterr().out
    assert "float32, eager, runner V1, device a CPU" in out
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows if row and row[0].isdigit()] == [str(2**n) for n in range(9)]
    loads = expected_loads(learned(cpu), peek_heads(HEADS).taus, 63)
    assert f"{loads[0].ratio:.2f}" in next(row for row in rows if row[:1] == ["1"])
    with Image.open(picture) as image:
        assert image.width > 1000


def test_the_latest_of_what_fits_is_taken(keep, capfd, monkeypatch):
    keep(eager="False", dtype="torch.bfloat16")
    keep(eager="False")
    folder = keep(target="another")
    monkeypatch.chdir(os.path.dirname(TARGET))  # a folder has many names
    assert run("explain", "target", "heads/../heads", "--costs", folder) == 0
    first, *others = capfd.readouterr().out.splitlines()[:3]
    assert "float32, compiled" in first
    assert others[0].startswith("also kept: bfloat16, compiled") and "also" not in others[1]
    assert run("explain", TARGET, HEADS, "--costs", folder, "--dtype", "bfloat16") == 0
    assert "bfloat16, compiled" in capfd.readouterr().out.splitlines()[0]
    keep(lookup="True", threads="2 0-1")
    for flags, words in (
        ((), "runner V1, lookup, 2 CPUs (threads bound to 0-1), device a CPU;"),
        (("--lookup", "yes"), "runner V1, lookup, 2"),
        (("--lookup", "no"), "float32, compiled, runner V1, device"),
    ):
        assert run("explain", TARGET, HEADS, "--costs", folder, *flags) == 0
        assert words in capfd.readouterr().out.splitlines()[0]


def test_without_costs_it_says_how_to_get_them(keep, tmp_path, capfd, monkeypatch):
    for name in ("XDG_CACHE_HOME", "VLLM_CACHE_ROOT"):
        monkeypatch.setenv(name, str(tmp_path / name))
    assert run("explain", TARGET, HEADS) == 2
    error = said(capfd)
    assert str(tmp_path / "VLLM_CACHE_ROOT" / "medusa") in error
    assert "--measure" in error and "There are some" not in error
    assert run("explain", TARGET, HEADS, "--costs", keep(), "--eager", "no") == 2
    error = said(capfd)
    assert "eager False" in error and "There are some of float32, eager" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-speculative-tokens", "256"], "from 1 to 255"),
        (["--eager", "maybe"], "invalid choice"),
        (["--plot", "costs.txt"], "not a kind of picture"),
        (["--plot", "/"], "/ is a folder: name another"),
        (["--engine-args", '{"seed": 1}'], "is for --measure"),
        (["--measure"], "drop one"),
    ],
)
def test_what_can_not_work_is_refused(keep, capfd, arguments, message):
    assert run("explain", TARGET, HEADS, "--costs", keep(), *arguments) == 2
    assert message in said(capfd)


def test_an_engine_measures_first(keep, tmp_path, capfd, monkeypatch):
    """With the options that tables are looked up by, and in vLLM's cache."""
    started = []

    class Engine:
        def __init__(self, settings, sampling):
            started.append(settings)
            (tmp_path / "vllm").mkdir()
            (tmp_path / "vllm" / "medusa").symlink_to(keep(dtype="torch.bfloat16"))

        def close(self):
            started.append("closed")

    monkeypatch.setattr(measure, "VllmEngine", Engine)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the command sets it
    options = ("--dtype", "bfloat16", "--eager", "yes", "--engine-args", '{"max_num_seqs": 4}')
    assert run("explain", TARGET, HEADS, "--measure", *options) == 0
    assert capfd.readouterr().out.startswith("Step costs of")
    settings, closed = started
    assert (settings.model, settings.dtype, closed) == (TARGET, "bfloat16", "closed")
    assert settings.engine_args == {"enforce_eager": True, "max_num_seqs": 4}
    assert settings.speculative_config == {
        "method": "medusa", "model": HEADS, "budget": "auto", "num_speculative_tokens": 63,
    }  # fmt: skip
    assert run("explain", TARGET, HEADS, "--measure", "--runner", "V2") == 2
    assert "VLLM_USE_V2_MODEL_RUNNER" in said(capfd)


def test_what_can_not_be_read_is_left_out(keep, tmp_path):
    folder = keep()
    (tmp_path / "step-cost-a.json").write_text("{")
    (tmp_path / "step-cost-b.json").write_text('{"format": 1, "of": {}, "max_rows": 4}')
    (tmp_path / "step-cost-c.json").write_text('{"format": 0, "of": {}}')
    assert [kept.of for kept in kept_costs(folder)] == [OF]
    assert kept_costs(tmp_path / "nowhere") == []
    assert [kept.of for kept in kept_costs(CostStore(folder, OF, 1024).path)] == [OF]


@pytest.mark.parametrize(
    "variables",
    [{}, {"XDG_CACHE_HOME": "/a"}, {"VLLM_CACHE_ROOT": "~/b"}, {"XDG_CACHE_HOME": "~/c"}],
)
def test_the_cache_is_vllms(monkeypatch, variables):
    envs = pytest.importorskip("vllm.envs")
    for name in ("XDG_CACHE_HOME", "VLLM_CACHE_ROOT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(vllm_cache()) == envs.VLLM_CACHE_ROOT
