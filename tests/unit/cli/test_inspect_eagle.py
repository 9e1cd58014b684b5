"""`inspect` recognizes an EAGLE drafter, and checks that it fits a target."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.eagle import Eagle1, Eagle3

from vllm_medusa.cli import main
from vllm_medusa.offline.comparison import drafter_budgets
from vllm_medusa.offline.engine import medusa_config
from vllm_medusa.offline.options import CompareOptions, Speculation

TARGET = {"hidden_size": 64, "vocab_size": 512, "num_hidden_layers": 4}


def target(folder: Path, **changes: int) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TARGET | changes))
    save_file({"model.embed_tokens.weight": torch.zeros(4, 4)}, folder / "model.safetensors")
    return str(folder)


def inspect(capsys: Any, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *arguments])
    return int(ended.value.code or 0), capsys.readouterr().out


def test_eagle_3(tmp_path: Path, capsys: Any) -> None:
    drafter = Eagle3(torch.zeros(512, 64), 2 * torch.arange(200), (1, 2, 3)).save(tmp_path / "e")
    code, out = inspect(capsys, drafter, "--target", target(tmp_path / "t"))
    assert code == 0 and "method               eagle3" in out and "[1, 2, 3]" in out
    assert "draft_vocab_size     200" in out and "it fits" in out
    for changes, word in (
        ({"hidden_size": 32}, "NO hidden size"),
        ({"num_hidden_layers": 2}, "NO aux"),
    ):
        code, out = inspect(capsys, drafter, "--target", target(tmp_path / "t", **changes))
        assert code == 1 and word in out and "IT DOES NOT FIT" in out
    file = tmp_path / "e" / "model.safetensors"
    save_file(load_file(file) | {"d2t": torch.full((200,), 400)}, file)
    code, out = inspect(capsys, drafter, "--json")
    assert code == 1 and json.loads(out)["checks"][0]["verdict"] == "does not fit"


def test_eagle_1(tmp_path: Path, capsys: Any) -> None:
    weights = SimpleNamespace(weight=torch.nn.Parameter(torch.zeros(512, 64)))
    model = SimpleNamespace(get_input_embeddings=lambda: weights, lm_head=weights)
    drafter = Eagle1(model).save(tmp_path / "e")
    code, out = inspect(capsys, drafter, "--target", target(tmp_path / "t"))
    assert code == 0 and "method               eagle\n" in out


def test_one_that_reads_the_last_state_only(tmp_path: Path, capsys: Any) -> None:
    """NVIDIA has such; vLLM serves their chains."""
    last = {"eagle_config": {"use_aux_hidden_state": False}}
    drafter = Eagle3(torch.zeros(512, 64), 2 * torch.arange(200), (1, 2, 3))
    folder = drafter.save(tmp_path / "e", **last)
    file = tmp_path / "e" / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if n != "fc.weight"}, file)
    code, out = inspect(capsys, folder, "--target", target(tmp_path / "t"))
    assert code == 1 and "NO trees: it reads the target's last hidden state only" in out
    assert medusa_config(folder)["method"] == "eagle3"


def test_commands_take_its_folder_for_what_it_is(tmp_path: Path) -> None:
    """`generate`, `compare` and the like, by `--speculative-model`."""
    drafter = Eagle3(torch.zeros(512, 64), torch.arange(512), (1, 2, 3)).save(tmp_path / "e")
    own = {"method": "eagle3", "model": drafter, "tree": "dynamic"}
    assert medusa_config(drafter) == own
    assert medusa_config(drafter, "chain", budget="4") == own | {"tree": "chain", "budget": 4}
    assert medusa_config(str(tmp_path))["method"] == "medusa"
    Speculation(speculative_model=drafter, tree='{"width": 4}')
    with pytest.raises(ValueError, match="width"):
        Speculation(speculative_model=drafter, tree="mc_sim_7b_63")
    options = CompareOptions(
        target="t", heads=drafter, prompts=tmp_path, budgets=(80, 4, 60), tree='{"depth": 1}'
    )
    assert drafter_budgets(options) == [4, 10]
