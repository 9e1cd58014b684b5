"""The stages of one Medusa-2 run, in order."""

from __future__ import annotations

import argparse
import shutil
from typing import TYPE_CHECKING, Any

from rich.console import Console

from vllm_medusa.cli import train_medusa1
from vllm_medusa.cli.train_progress import StepProgress, accuracy_table, line_of

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from vllm_medusa.heads.model import MedusaHeads
    from vllm_medusa.training.hidden_cache import HiddenStates
    from vllm_medusa.training.inputs import Inputs
    from vllm_medusa.training.joint_recipe import JointRecipe
    from vllm_medusa.training.medusa1 import Recipe
    from vllm_medusa.training.quality import QualityBounds
    from vllm_medusa.training.state import TrainingRun
    from vllm_medusa.training.target import Target
    from vllm_medusa.training.texts import Texts
    from vllm_medusa.training.workers import Workers


def bounds_of(args: argparse.Namespace) -> QualityBounds:
    """How much quality may be lost."""
    from vllm_medusa.training.quality import QualityBounds

    return QualityBounds(args.max_kl, args.max_perplexity_ratio)


class Medusa2Job:
    """One run; every stage goes on where it was when the run was killed."""

    def __init__(
        self,
        args: argparse.Namespace,
        inputs: Inputs,
        workers: Workers,
        console: Console,
        run: TrainingRun,
        settings: dict[str, Any],
        dtype: Any,
    ) -> None:
        from vllm_medusa.training.lora import adaptable_modules
        from vllm_medusa.training.target import Target

        self.args, self.inputs, self.workers, self.console = args, inputs, workers, console
        self.run, self.settings, self.dtype = run, settings, dtype
        self.origin = train_medusa1.origin_of(args) if workers.main else {}
        self.target: Target | None = Target.load(
            inputs.source, dtype=dtype, device=workers.device, quantization=args.quantization
        )
        adaptable_modules(self.target.model, args.lora_modules)  # refused before the warm-up
        self._check_space(self.target)
        self.heads = self._first_heads(self.target)
        self.heldout: HiddenStates | None = None
        self.trained: dict[str, int] = {}

    def measure_original(self, texts: Texts) -> None:
        """Keep what the original model makes of the held-out text."""
        bound = int(self.args.cache_gb * 1e9)  # all of them fit: see `_require_room`
        file = self.args.heldout or self.args.data
        self.heldout = self._states(texts, file, self.run.work, self.dtype, bound)
        train_medusa1.build_states([self.heldout], self.workers, self.console)

    def warm_up(self, texts: Texts, recipe: Recipe) -> None:
        """Train the heads alone, unless trained ones were given."""
        if self.args.start_heads is not None:
            return
        from vllm_medusa.training.medusa1 import Medusa1
        from vllm_medusa.training.state import TrainingRun

        assert self.target is not None and self.heldout is not None
        states = self._states(
            texts,
            self.args.data,
            self.args.cache or self.run.work,
            train_medusa1.cache_dtype(self.args, self.dtype),
            int(self.args.cache_gb * 1e9) - self.heldout.cached_bytes,
        )
        train_medusa1.build_states([states], self.workers, self.console)
        folder = self.run.work / "warm-up"
        with TrainingRun(folder, {}, main=self.workers.main) as run:
            trainer = Medusa1(
                self.target, self.heads, states, self.heldout, recipe, run, self.workers
            )
            with StepProgress(self.console, "warm-up", trainer.steps) as bar:
                trainer.train(lambda step, _, entry: bar.show(step, line_of(entry)))
        states.release()
        self.workers.wait()
        if self.workers.main:
            shutil.copyfile(folder / "training" / "log.jsonl", self.run.folder / "warm-up.jsonl")
            if not self.args.keep_cache:
                states.remove()

    def train_jointly(self, recipe: JointRecipe) -> None:
        """Train heads and adapter; keeps the adapter in a folder and lets the model go."""
        from vllm_medusa.training import lora
        from vllm_medusa.training.curves import draw_curves
        from vllm_medusa.training.medusa2 import Medusa2
        from vllm_medusa.training.merging import save_adapter

        assert self.target is not None
        adapted = lora.attach(self.target.model, recipe.lora, seed=recipe.seed)
        trainer = Medusa2(
            self.target,
            adapted,
            self.heads,
            self.inputs.train,
            self.heldout,
            recipe,
            self.run,
            self.workers,
        )
        trainer.resume()
        share = sum(p.numel() for p in trainer.adapter.values()) / sum(
            p.numel() for p in self.target.model.parameters()
        )
        self.console.print(
            f"joint stage: {trainer.steps} steps, {trainer.tokens} tokens; the adapter is "
            f"{share:.1%} of the target; {recipe.lm_loss} for the target, lambda_0 "
            f"{recipe.heads_weight.peak:g} ({recipe.heads_weight.growth})",
            soft_wrap=True,
        )
        with StepProgress(self.console, "joint", trainer.steps) as bar:
            trainer.train(lambda step, _, entry: bar.show(step, _line(entry)))
        self.trained = {"joint_steps": trainer.steps, "joint_tokens": trainer.tokens}
        if self.workers.main:
            save_adapter(adapted, self.run.work / "adapter")
            title = f"Medusa-2 on {self.inputs.source}"
            draw_curves(self.run.entries(), self.run.folder / "curves.png", title)
        elif self.heldout is not None:
            self.heldout.release()  # the main process may remove them
        self.target = None

    def publish(self) -> None:
        """Merge, measure, write."""
        from vllm_medusa.training.hidden_cache import DTYPES
        from vllm_medusa.training.medusa2_result import publish

        args = self.args
        if args.quantization is not None:  # what is merged was never quantised: nor is its original
            self._measure_unquantised()
        result = publish(
            self.run,
            self.run.work / "adapter",
            self.heads,
            self.inputs.source,
            self.heldout,
            training={**self.settings, **self.trained},
            provenance=self.origin,
            save=args.save,
            bounds=bounds_of(args),
            dtype=self.dtype,
            device=self.workers.device,
            heads_dtype=DTYPES[args.save_dtype],
        )
        if result.measured is not None:
            self.console.print(accuracy_table(result.measured.heads))

    def _measure_unquantised(self) -> None:
        from vllm_medusa.training.hidden_cache import HiddenStates
        from vllm_medusa.training.joint_measure import release_target
        from vllm_medusa.training.target import Target

        assert self.heldout is not None
        self.heldout.remove()  # of the quantised model
        original = Target.load(self.inputs.source, dtype=self.dtype, device=self.workers.device)
        self.heldout = HiddenStates(
            original,
            self.heldout.texts,
            self.run.work,
            {name: self.settings[name] for name in train_medusa1.CACHE_KEY}
            | {"quantization": None},
            dtype=self.dtype,
            max_bytes=int(self.args.cache_gb * 1e9),
            file=self.args.heldout or self.args.data,
        )
        self.heldout.build()
        release_target(self.heldout)

    def _states(
        self, texts: Texts, file: Path, folder: Path, dtype: torch.dtype, max_bytes: int
    ) -> HiddenStates:
        from vllm_medusa.training.hidden_cache import HiddenStates

        assert self.target is not None
        key = {name: self.settings[name] for name in train_medusa1.CACHE_KEY}
        return HiddenStates(
            self.target, texts, folder, key, dtype=dtype, max_bytes=max_bytes, file=file
        )

    def _check_space(self, target: Target) -> None:
        """Refuse to start what the disk can't hold in the end: the merged model."""
        from vllm_medusa.training.hidden_cache import DTYPES

        stored = DTYPES.get(self.inputs.dtype or "", self.dtype)
        wanted = sum(p.numel() for p in target.model.parameters()) * stored.itemsize
        free = shutil.disk_usage(self.run.work).free
        if wanted > free:
            raise ValueError(
                f"the new target takes {wanted / 1e9:.1f} GB, and {self.run.output} has "
                f"{free / 1e9:.1f} GB free. Name another disk by --output."
            )

    def _first_heads(self, target: Target) -> MedusaHeads:
        if self.args.start_heads is None:
            return train_medusa1.make_heads(self.args, self.inputs, target)
        import torch

        from vllm_medusa.heads.checkpoint import load_heads

        heads, _ = load_heads(
            self.args.start_heads,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            dtype=torch.float32,
            device=self.workers.device,
        )
        return heads


def _line(entry: dict[str, Any]) -> str:
    if "quality" in entry:
        return f"{line_of(entry)}; KL {entry['quality']['kl']:.2g}"
    return f"{line_of(entry)}; target's {entry['lm_loss']:.2g}" if "lm_loss" in entry else ""
