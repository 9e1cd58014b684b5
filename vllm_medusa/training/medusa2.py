"""Medusa-2: heads and target trained together (https://arxiv.org/abs/2401.10774, section 2.2.2).

Its three ingredients: the joint loss (`joint_loss`), whose weight of the heads grows
(`recipe.HeadsWeight`); a learning rate of the heads that is a multiple of the backbone's; and a
warm-up stage in which the heads alone are trained, which is Medusa-1 as it stands (`medusa1`).

What trains of the target is a LoRA adapter. Switched off it is the original model, the teacher; its
hidden states on held-out text, kept since the warm-up, are what quality is measured against.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_medusa.heads.checkpoint import save_heads
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.offline.records import Record
from vllm_medusa.training.batches import plan_steps, split_passes
from vllm_medusa.training.hidden_cache import HiddenStates
from vllm_medusa.training.initial_heads import target_lm_head
from vllm_medusa.training.joint_loss import JointBatch, JointLosses, joint_losses
from vllm_medusa.training.joint_measure import measure_joint, release_target, states_of
from vllm_medusa.training.lora import adapter_parameters, dropping_out
from vllm_medusa.training.merging import save_adapter
from vllm_medusa.training.optimisation import make_optimizer
from vllm_medusa.training.recipe import JointRecipe
from vllm_medusa.training.state import TrainingRun
from vllm_medusa.training.target import Target
from vllm_medusa.training.trainer import Trainer
from vllm_medusa.training.workers import Workers

if TYPE_CHECKING:
    from peft import PeftModel


class Medusa2(Trainer):
    """The joint stage: only the adapter and the heads are given to the optimiser."""

    heads: MedusaHeads
    measures_ends = True

    def __init__(
        self,
        target: Target,
        adapted: PeftModel,  # wraps the target's model, with a fresh adapter (`lora.attach`)
        heads: MedusaHeads,  # to go on with, fp32, changed in place
        records: Sequence[Record],  # to train on
        heldout: HiddenStates,  # the original model's on held-out text, all kept in files
        recipe: JointRecipe,
        run: TrainingRun,
        workers: Workers,
        *,
        save_seconds: float = 60.0,  # between two states; the result doesn't depend on it
    ) -> None:
        """Prepare training.

        Raises:
            ValueError: held-out states that would be computed by the model being trained.

        """
        super().__init__(heads, recipe, run, workers, save_seconds)
        self.target, self.adapted, self.recipe = target, adapted, recipe
        self.records = records
        self.heldout = release_target(heldout)
        self.draft_head = target_lm_head(target, heads.token_map)
        self.token_map = None if heads.token_map is None else heads.token_map.cpu()
        self.adapter = adapter_parameters(adapted)
        self.optimizer = make_optimizer(
            [(self.adapter.values(), 1.0), (heads.parameters(), recipe.heads_rate)],
            recipe.optimisation,
        )
        self.lengths = [len(record.token_ids) for record in records]
        self.plan = plan_steps(
            self.lengths,
            epochs=recipe.epochs,
            step_tokens=recipe.step_tokens,
            seed=recipe.seed,
            steps=recipe.steps,
        )
        self.steps = len(self.plan)
        if recipe.checkpointing:
            _checkpoint_layers(target.model)

    @property
    def tokens(self) -> int:
        """Text tokens of all steps."""
        return sum(self.lengths[text] for step in self.plan for text in step)

    def state(self) -> dict[str, Any]:
        """See `Trainer`."""
        return super().state() | {"adapter": {n: p.detach() for n, p in self.adapter.items()}}

    def take(self, state: dict[str, Any]) -> None:
        """See `Trainer`."""
        super().take(state)
        with torch.no_grad():
            for name, parameter in self.adapter.items():
                parameter.copy_(state["adapter"][name])

    def measured(self) -> dict[str, Any]:
        """Heads and quality on held-out text as they are now, plain JSON.

        Without autocast: the original's states, kept in files, were computed without it.
        """
        found = measure_joint(
            self.heads,
            self.draft_head,
            self.target,
            self.heldout,
            states_of(self.target, self.heldout.texts),
            workers=self.workers,
            rows=self.recipe.measured_rows,
        )
        return found.to_dict()

    def _one_step(self) -> dict[str, Any]:
        """Gradients of all passes and processes, then one step of the optimiser."""
        recipe, workers = self.recipe, self.workers
        texts = self.plan[self.step]
        passes = split_passes(texts, self.lengths, recipe.pass_tokens)
        mine = range(workers.rank, len(passes), workers.world)
        batches = [self._batch(passes[number]) for number in mine]
        counts = torch.zeros(1 + self.heads.num_heads, dtype=torch.float64)
        for batch in batches:
            counts += torch.cat([torch.tensor([batch.counts[0]]), batch.counts[1].cpu()])
        counts = workers.add_up(counts).clamp(min=1).to(workers.device)
        weight = recipe.heads_weight.at(self.step, self.steps)
        factors = (weight * self.decay / counts[1:]).float()
        sums = torch.zeros_like(counts)
        self.optimizer.zero_grad(set_to_none=True)
        for number, batch in zip(mine, batches, strict=True):
            # a pass drops the same out in whatever process it is
            with dropping_out(self.adapted, hash((recipe.seed, self.step, number))):
                found = self._losses(batch, 1.0 / float(counts[0]), factors)
                found.loss.backward()
                sums += torch.cat([found.lm_sum.view(1), found.head_sums])
        sums, stepped = self.update(sums, texts)
        means = sums / counts
        return {
            "step": self.step + 1,
            "loss": float(means[0] + weight * (means[1:] * self.decay).sum()),
            "lm_loss": float(means[0]),
            "losses": [round(value, 5) for value in means[1:].tolist()],
            "lambda_0": weight,
            **stepped,
            "rows": sum(self.lengths[text] for text in texts),
        }

    def _batch(self, texts: Sequence[int]) -> JointBatch:
        return JointBatch.of(
            [self.records[text] for text in texts],
            self.heads.num_heads,
            soft=self.recipe.labels == "soft",
            token_map=self.token_map,
            device=self.workers.device,
        )

    def _losses(self, batch: JointBatch, lm_weight: float, factors: Tensor) -> JointLosses:
        with self.autocast():
            return joint_losses(
                self.target,
                self.adapted,
                self.heads,
                self.draft_head,
                batch,
                lm_weight=lm_weight,
                head_weights=factors,
                distill=self.recipe.lm_loss == "kl",
            )

    def _sums(self, part: int) -> Tensor:
        found = self._losses(self._batch([part]), 1.0, self.decay)
        return torch.cat([found.lm_sum.view(1), found.head_sums])

    def _lines(self, parts: Sequence[int]) -> list[int]:
        return sorted({self.records[text].line for text in parts})

    def _keep(self, folder: Path) -> str:
        save_heads(folder / "heads", self.heads, {"training": {"steps": self.step}})
        save_adapter(self.adapted, folder / "adapter")
        return "heads and adapter"


def _checkpoint_layers(model: Any) -> None:
    """Switch gradient checkpointing on, which transformers ties to a layer's training mode."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"{type(model).__name__} can't be checkpointed; leave that option out")
    for layer in layers:
        layer.training = True  # of the layer alone: the dropout in it stays off
