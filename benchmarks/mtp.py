"""Tokens per step of chains and trees over an MTP module that is trained here.

    vllm-medusa distill TARGET --prompts PROMPTS --temperature 0.7 -o texts.jsonl
    python -m benchmarks mtp --target TARGET --data texts.jsonl

A small Llama or Qwen2 target becomes a checkpoint of MiMo, whose layers are Qwen2's (Llama's with
biases), with one module. `vllm_medusa.training` trains it: its loop, losses and labels are those of
an EAGLE-3 drafter, whose inputs are replaced. A share of the texts is held out; the module's loss
and the target's own are of the same held-out tokens, and the default prompts are those texts'.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.case import ROOT, Case, Row
from benchmarks.compare import BY_NODES, COLUMNS
from benchmarks.engines import Arm, EngineOptions, compare, explain_notes
from demo import smollm2
from vllm_medusa.files import read_json, write_json
from vllm_medusa.heads.eagle_model import EagleDrafter, EagleShape, Norm
from vllm_medusa.job import SILENT, Progress
from vllm_medusa.offline.records import write_records
from vllm_medusa.options import AtLeastZero, FromZero, Positive, option
from vllm_medusa.training.eagle3 import EMBEDDING_SHARE, Eagle3, decoder_layers
from vllm_medusa.training.job import Job
from vllm_medusa.training.losses import AnyHeads
from vllm_medusa.training.options import HeadOptions, StepOptions, TextFiles, TrainOptions
from vllm_medusa.training.run import TrainingRun
from vllm_medusa.training.target import DTYPES, Target
from vllm_medusa.training.train import train_frozen
from vllm_medusa.training.workers import Workers

BIASED = ("q_proj", "k_proj", "v_proj")
NAMES = {"midlayer.": "", "fc.": "input_proj.", "norm.": "final_layernorm."}  # ours -> MiMo's

FORMS = {"stock": "", "chain": "stock", "dynamic": "chain"}  # and what its gain is relative to


class MtpOptions(EngineOptions):
    """The texts to train on, and the sizes to measure."""

    drafter: Path = option(
        "folder for the target with its module; a finished one is used again",
        default=ROOT / "build" / "mtp",
        shown="build/mtp",
    )
    data: Path = option("texts to train on and to hold out, as for `vllm-medusa train`")
    texts: tuple[Path, ...] = option(
        "files of prompts", default=(), shown="prompts of the held-out texts"
    )
    levels: Positive = option("levels of drafts in training", default=3)
    epochs: Positive = option("passes over the texts", default=3)
    nodes: tuple[Positive, ...] = option("draft nodes", default=(2, 3, 4, 7, 15, 31))
    temperatures: tuple[AtLeastZero, ...] = option(default=(0.0,))
    batch: tuple[Positive, ...] = option("concurrent requests", default=(8,))
    rounds: FromZero = option(default=0)


class MtpModule(EagleDrafter):
    """MiMo's module: an EAGLE drafter with other inputs, without an LM head of its own."""

    frozen_lm_head = True

    def __init__(self, shape: EagleShape, steps: int) -> None:
        super().__init__(replace(shape, norm_output=True), steps)
        hidden, layer = shape.hidden_size, self.midlayer
        for name in BIASED:
            layer.self_attn[name] = nn.Linear(hidden, len(layer.self_attn[name].weight))  # type: ignore[arg-type]
        del layer.hidden_norm
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.token_layernorm = Norm(hidden, shape.rms_norm_eps)
        self.hidden_layernorm = Norm(hidden, shape.rms_norm_eps)

    @classmethod
    def new(cls, target: Target, steps: int) -> MtpModule:
        """A module that starts as the target's last layer, norm and LM head."""
        config, hidden = target.model.config.get_text_config(), target.hidden_size
        layers, given = (config.num_hidden_layers,), dict[str, Tensor]()
        module = cls(EagleShape.of(config, layers, hidden, target.vocab_size), steps)
        given |= {f"midlayer.{k}": v for k, v in decoder_layers(target)[-1].named_parameters()}
        given |= {
            "norm.weight": target.backbone.norm.weight,
            "lm_head.weight": target.lm_head_weight,
        }
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in given:
                    parameter.copy_(given[name])
                elif name.endswith(".bias"):
                    parameter.zero_()
            scales = torch.tensor([1.0, EMBEDDING_SHARE]).repeat_interleave(hidden)
            module.fc.weight.copy_(torch.eye(hidden).repeat(1, 2) * scales)
        return module

    def combine(self, features: Tensor) -> Tensor:
        """See `EagleDrafter`: the output of the target's last layer, unchanged."""
        return features

    def inputs(self, embeds: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See `EagleDrafter`; the layer's input is [B, L, H], and position 0 has no embedding."""
        embeds = embeds * (positions > 0).reshape(-1, embeds.shape[1], 1)
        parts = [self.hidden_layernorm(states), self.token_layernorm(embeds)]
        x = self.fc(torch.cat(parts, -1))
        return self.midlayer.input_layernorm(x), x

    def tensors(self) -> dict[str, Tensor]:
        """All but the LM head, by MiMo's names."""
        found = dict[str, Tensor]()
        for name, parameter in self.named_parameters():
            ours = next((prefix for prefix in NAMES if name.startswith(prefix)), "")
            found[f"model.mtp_layers.0.{NAMES.get(ours, '')}{name.removeprefix(ours)}"] = parameter
        del found["model.mtp_layers.0.lm_head.weight"]
        return found


class MtpJob(Job):
    """Trains a module like an EAGLE-3 drafter, and writes it into a copy of the target."""

    target: Target
    method: Any  # an `Eagle3`

    def __init__(self, options: TrainOptions, progress: Progress = SILENT) -> None:
        super().__init__(options, Workers(options.machine.device), progress, ())
        self.layers = (self.fingerprint["num_layers"],)  # the last layer's output

    def first_drafter(self, target: Target) -> EagleDrafter:
        """See `Job`. Raises ValueError: the target's layers are not like Qwen2's."""
        config = target.model.config
        shape = EagleShape.of(config, (), target.hidden_size, target.vocab_size)
        width = shape.num_attention_heads * shape.head_dim
        if config.model_type not in ("llama", "qwen2") or width != target.hidden_size:
            raise ValueError(
                f"{self.source}: {config.model_type} with {shape.num_attention_heads} heads of "
                f"{shape.head_dim} channels. Use a Llama or Qwen2 target whose heads have "
                f"{target.hidden_size} channels in all, as its hidden states."
            )
        return MtpModule.new(target, self.options.heads.num_heads)

    def create_method(self, target: Target, run: TrainingRun) -> Any:
        """See `Job`."""
        self.target, self.method = target, super().create_method(target, run)
        return self.method

    def save(self, heads: AnyHeads, more: Mapping[str, Any], *_: Any) -> None:
        """Write a checkpoint of MiMo."""
        assert isinstance(heads, MtpModule)
        about = {"tokens": self._tokens, **more}
        if self.method.heldout is not None:
            about["target_loss"] = target_loss(self.method)
        heads.to(device="cpu", dtype=DTYPES[self.options.heads.save_dtype])
        dtype = self.stored or torch.float32
        tensors = {
            name: tensor.to("cpu", dtype, copy=True)
            for name, tensor in self.target.model.state_dict().items()
        }
        tensors, config = as_mimo(tensors, self.target.model.config.to_dict())
        tensors |= {name: parameter.detach() for name, parameter in heads.tensors().items()}
        output = self.options.files.output
        save_file(tensors, output / "model.safetensors")
        for file in Path(self.source).iterdir():
            if "token" in file.name or file.name in (
                "chat_template.jinja",
                "generation_config.json",
            ):
                shutil.copyfile(file, output / file.name)
        config |= {"dtype": str(dtype).removeprefix("torch."), "mtp_training": about}
        write_json(output / "config.json", config)


def as_mimo(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A Llama or Qwen2 target as MiMo: tensors and config, without those of the module."""
    biases = {
        name.removesuffix("weight") + "bias": tensor.new_zeros(len(tensor))
        for name, tensor in tensors.items()
        if name.endswith(tuple(f".{part}.weight" for part in BIASED))
    }
    changes = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
    }
    return biases | dict(tensors), {**config, **changes}


@torch.no_grad()
def target_loss(method: Eagle3) -> float:
    """The target's own mean cross-entropy of the held-out labels of the module's first level."""
    assert method.heldout is not None
    total, count = 0.0, 0
    for pieces in method.heldout.passes(method.pass_rows):
        batch = method.collate(pieces, method.heldout)
        last, label = method.states(batch)[1:, -method.width :], batch.labels[:-1, 0]
        logits = method.teacher(last).float()  # of row n + 1, which predicts the label of row n
        total += float(F.cross_entropy(logits, label, reduction="sum"))
        count += int((label >= 0).sum())
    return round(total / max(count, 1), 4)


def train(options: TrainOptions, progress: Progress = SILENT) -> dict[str, Any]:
    """Train a module, or find the finished one; returns what is known of it."""
    job, output = MtpJob(options, progress), options.files.output
    train_frozen(job)
    write_records(output / "training" / "heldout.jsonl", job.heldout.records)
    return dict(read_json(output / "config.json")["mtp_training"])


def arms(options: MtpOptions, about: Mapping[str, Any]) -> Iterator[Arm]:
    """Chains in vLLM; chains and dynamic trees in one engine each, which requests limit."""
    heldout, most = about["heldout"], max(options.nodes)
    known = {"training_tokens": about["tokens"], "target_loss": about["target_loss"]}
    known |= {"loss": heldout["loss"], "top": [top[0] for top in heldout["top"]]}
    for form, before in FORMS.items():
        for size in options.nodes:
            config: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": size}
            if before:
                config |= {"num_speculative_tokens": most, "budget": most, "tree": form}
            yield Arm(
                f"{form} {size}",
                config,
                {"drafter": "mtp", "form": form, "nodes": size, **known},
                stock=not before,
                against=f"{before} {size}" if before else "",
                request={"medusa": {"max_draft_tokens": size}} if before else None,
            )


def run(options: MtpOptions, progress: Progress) -> Iterator[Row]:
    """A row for each form, size and temperature."""
    target = options.target or smollm2.build(smollm2.MADE / "target", note=progress.note)
    options.drafter.parent.mkdir(parents=True, exist_ok=True)
    training = TrainOptions(
        model=str(target),
        files=TextFiles(data=options.data, output=options.drafter),
        heads=HeadOptions(
            kind="eagle3", num_heads=options.levels, lm_heads="shared", draft_vocab=0
        ),
        training=StepOptions(epochs=options.epochs),
    )
    about = train(training, progress)
    texts = options.texts or (options.drafter / "training" / "heldout.jsonl",)
    options = replace(options, target=options.drafter, texts=texts)
    yield from compare(list(arms(options, about)), options, progress, options.tasks())


COLUMNS_OF_MODULE = {
    "training_tokens": COLUMNS["training_tokens"],
    "target_loss": ("target's loss", ".2f"),
    "loss": ("module's, by level", ".2f"),
    "top": ("its top-1 accuracy", ".2f"),
}
SHOWN = "temperature form nodes tau tau_error gain gain_error steps requests"
CASE = Case(
    MtpOptions,
    run,
    {key: COLUMNS[key] for key in SHOWN.split()} | COLUMNS_OF_MODULE,
    quick={"prompts": 2, "max_tokens": 24, "nodes": (2, 4), "epochs": 1},
    plot=BY_NODES,
    text=explain_notes,
)
