"""The Medusa drafter of vLLM's workers: the weights it loads, and its drafts."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
import torch
from support.one_rank import one_rank
from support.random_heads import HIDDEN, VOCAB, random_heads, write
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.v1.worker.cpu_worker import Worker  # this module first: it adapts V2 to the CPU

from vllm_medusa.config import AcceptanceConfig
from vllm_medusa.heads.checkpoint import load_heads, save_heads
from vllm_medusa.heads.hydra import HydraHeads
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.integration import compat
from vllm_medusa.integration.drafters import medusa_drafter, sharding
from vllm_medusa.integration.drafters.medusa_drafter import MedusaDrafter
from vllm_medusa.integration.startup.options import TreeSettings
from vllm_medusa.integration.target import store_target_rows
from vllm_medusa.integration.v2 import speculator
from vllm_medusa.proposer.topk import VocabShard
from vllm_medusa.tree import TokenTree


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    with one_rank(tmp_path_factory.mktemp("ranks") / "store"):
        yield


def randomized(module: torch.nn.Module) -> torch.nn.Module:
    for parameter in module.requires_grad_(False).parameters():
        torch.nn.init.normal_(parameter)
    return module


def drafted(drafter: MedusaDrafter, states: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
    """The tokens of a static tree, without the root."""
    nodes = drafter.options.tree.num_nodes
    return drafter.draft(states, root, nodes, torch.zeros_like(root)).token_ids[:, 1:]


def make_drafter(heads: Path, tree: TokenTree, device: str = "cpu") -> MedusaDrafter:
    options = TreeSettings(str(heads), None, tree, AcceptanceConfig())
    model = SimpleNamespace(
        get_hidden_size=lambda: HIDDEN, get_vocab_size=lambda: VOCAB, dtype=torch.float32
    )
    config = SimpleNamespace(
        additional_config={"medusa": options.to_dict()},
        model_config=model,
        device_config=SimpleNamespace(device=device),
    )
    return MedusaDrafter(config)


@pytest.mark.parametrize("num_lm_heads", [5, 0])
def test_unused_heads_cost_nothing(num_lm_heads, alone, tmp_path, monkeypatch):
    weights, products = [], []
    original = compat.packed_linear

    def packed_linear(weight, bias):
        size = weight.numel()  # read once per product
        weights.append(size)
        product = original(weight, bias)

        def counted(x):
            products.append(size * x.shape[0])
            return product(x)

        return counted

    monkeypatch.setattr(compat, "packed_linear", packed_linear)
    lm_head = torch.randn(VOCAB, HIDDEN)
    target = torch.nn.Module()
    target.compute_logits = lambda rows: rows @ lm_head.T
    five = random_heads(5, 2, num_lm_heads=num_lm_heads)
    three = random_heads(3, 2, num_lm_heads=0)
    three.layers, three.lm_heads = five.layers[:3], five.lm_heads[:3]
    costs, drafts = [], []
    for name, plain in (("five", five), ("three", three)):
        write(tmp_path / name / "model.safetensors", plain.spelled("vllm"))
        tree = TokenTree.dense([3, 2, 1])
        drafter = make_drafter(tmp_path / name, tree)
        drafter.load_model(target)
        states = torch.randn(4, HIDDEN, generator=torch.manual_seed(0))
        drafts.append(drafted(drafter, states, torch.zeros(4, dtype=torch.int64)))
        costs.append((sum(weights), sum(products)))
        weights.clear()
        products.clear()
    own = 3 * 2 * HIDDEN * HIDDEN + (3 * VOCAB * HIDDEN if num_lm_heads else 0)
    assert costs == [(own, 4 * own)] * 2
    assert torch.equal(*drafts)


def test_a_rank_never_loads_rows_of_others(tmp_path, monkeypatch):
    """They are removed on the host."""
    devices = []

    def load(*args, **kwargs):
        heads, info = load_heads(*args, **kwargs)
        devices.extend(parameter.device.type for parameter in heads.parameters())
        return heads, info

    monkeypatch.setattr(medusa_drafter, "load_heads", load)
    group = SimpleNamespace(rank_in_group=1, world_size=2)
    monkeypatch.setattr(sharding, "get_tp_group", lambda: group)
    monkeypatch.setattr(sharding, "FEWEST_IDS", 1)
    write(tmp_path / "model.safetensors", random_heads(2, 1, num_lm_heads=2).spelled("vllm"))
    drafter = make_drafter(tmp_path, TokenTree.chain(2), "meta")  # instead of a GPU
    drafter.load_model(torch.nn.Module())
    assert isinstance(drafter.heads, MedusaHeads)
    assert set(devices) == {"cpu"}
    assert {p.device.type for p in drafter.heads.parameters()} == {"meta"}
    assert drafter.heads.lm_head_weight is not None
    assert drafter.heads.lm_head_weight.shape == (2, VOCAB // 2, HIDDEN)


@pytest.mark.parametrize("in_parts", [False, True])
def test_drafts_are_the_targets_ids(in_parts, alone, tmp_path, monkeypatch):
    torch.manual_seed(0)
    known = torch.tensor([7, 11, 9, 13, 5])
    heads = randomized(MedusaHeads(2, 1, HIDDEN, VOCAB, token_map=known))
    save_heads(tmp_path, heads)
    drafter = make_drafter(tmp_path, TokenTree.dense([3]))
    drafter.load_model(torch.nn.Module())
    states = torch.randn(4, HIDDEN)
    logits = heads.compute_logits(heads(states), None)  # [B, K, 5]
    if in_parts:  # as the only rank of several
        drafter._shard = VocabShard.of_rank(0, 5, 5)
        monkeypatch.setattr(sharding, "all_gather", lambda keys: keys.unsqueeze(0))
    root = torch.zeros(len(states), dtype=torch.int64)
    assert torch.equal(drafted(drafter, states, root), known[logits[:, 0].topk(3).indices])


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_only_rows_of_the_draft_vocabulary_are_read(kind, alone, tmp_path):
    known = torch.tensor([7, 11, 9, 13, 5])
    torch.manual_seed(1)
    heads = {
        "medusa": MedusaHeads(2, 1, HIDDEN, VOCAB, num_lm_heads=0, token_map=known),
        "hydra": HydraHeads(2, 1, HIDDEN, VOCAB, num_lm_heads=0, token_map=known),
    }[kind]
    save_heads(tmp_path, randomized(heads))
    target = CappedTarget(soft_cap=None, scale=1.0, bias=False)
    drafter = make_drafter(tmp_path, TokenTree.dense([3, 1]))
    drafter.load_model(target)
    target.processor = None  # it must not be used any more
    rows, root = target.lm_head.weight[:VOCAB], torch.tensor([3, 1, 4, 1])
    states = torch.randn(4, HIDDEN)
    if kind == "hydra":
        heads.use_target_embedding(target.embedding.weight)
    logits = heads.compute_logits(heads(states, 1, root[:, None]), lambda x: x @ rows.T)
    found = drafted(drafter, states, root)[:, ::2]  # nodes in depth-first order
    assert torch.equal(found, known[logits[:, 0].topk(3).indices])
    assert kind == "hydra" or drafter.stages._again == HIDDEN * len(known)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("soft_cap", "scale"), [(None, 1.0), (None, 0.3), (3.0, 1.0), (3.0, 0.5)])
def test_stored_rows_give_the_targets_logits(soft_cap, scale, bias, alone):
    torch.manual_seed(0)
    known = torch.tensor([7, 11, 9, 13, 5])
    heads = MedusaHeads(2, 1, HIDDEN, VOCAB, num_lm_heads=0, token_map=known)
    target = CappedTarget(soft_cap, scale, bias)
    cap = store_target_rows(heads, target, torch.device("cpu"), torch.float32)
    states = torch.randn(6, HIDDEN)
    wanted = target.compute_logits(states)[:, known]
    found = heads.compute_logits(states[:, None]).squeeze(1)
    if cap is not None:
        assert not torch.allclose(found, wanted, atol=0.1)
        found = torch.tanh(found / cap) * cap
    torch.testing.assert_close(found, wanted)
    assert (cap is None) == (soft_cap is None) and target.processor.soft_cap == soft_cap


class CappedTarget(torch.nn.Module):
    """vLLM's LM head and embedding, without a model between them."""

    def __init__(self, soft_cap: float | None, scale: float, bias: bool) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(VOCAB, HIDDEN)
        self.lm_head = ParallelLMHead(VOCAB, HIDDEN, bias=bias)
        randomized(self)
        for layer in (self.embedding, self.lm_head):
            layer.quant_method.process_weights_after_loading(layer)
        self.processor = LogitsProcessor(VOCAB, soft_cap=soft_cap, scale=scale)

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.processor(self.lm_head, states, self.lm_head.bias)


def test_heads_survive_sleep_level_2(tmp_path, monkeypatch):
    """Uses vLLM's own code, whose allocator silently drops the weights."""
    heads = randomized(MedusaHeads(2, 1, HIDDEN, VOCAB, token_map=torch.arange(5)))
    before = {name: tensor.clone() for name, tensor in heads.state_dict().items()}

    def load(self, target):
        self.heads = heads

    monkeypatch.setattr(MedusaDrafter, "load_model", load)
    monkeypatch.setattr(speculator, "tree_model_state", lambda *_: object)
    owner = speculator.TreeSpeculator.__new__(speculator.TreeSpeculator)
    drafter = make_drafter(tmp_path, TokenTree.chain(2))
    vars(owner).update(drafter=drafter, vllm_config=None, trees=None)
    draft = owner.load_draft_model(SimpleNamespace(), set())

    def lose_weights(level):
        for tensor in heads.state_dict().values():
            tensor.fill_(99)

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (1, 1))
    model_config = SimpleNamespace(
        enable_nccl_comm_suspend=False, sleep_preserve_parameter_names=None
    )
    worker = Worker.__new__(Worker)
    worker.vllm_config = SimpleNamespace(model_config=model_config)
    worker.model_config = model_config
    worker.model_runner = SimpleNamespace(model=torch.nn.Module(), get_draft_model=lambda: draft)
    worker._sleep_mode_backend = SimpleNamespace(suspend=lose_weights, resume=lambda tags: None)
    worker._sleep_saved_draft_buffers = {}
    worker.synchronize_device = lambda: None
    worker.sleep(2)
    assert not torch.equal(heads.state_dict()["lm_head_weight"], before["lm_head_weight"])
    worker.wake_up()
    for name, tensor in heads.state_dict().items():
        assert torch.equal(tensor, before[name]), name
