"""What Medusa-1 and Medusa-2 runs have in common: what follows from the options and the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vllm_medusa.heads.eagle_model import choose_layers
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.heads.provenance import provenance
from vllm_medusa.job import Progress
from vllm_medusa.offline.machine import fast_bfloat16
from vllm_medusa.offline.records import digest_of
from vllm_medusa.training.draft_vocab import (
    LARGEST,
    count_tokens,
    coverage,
    frequent_tokens,
    usual_size,
)
from vllm_medusa.training.hidden_cache import DTYPES, HiddenStates, StateSource
from vllm_medusa.training.initial_heads import new_heads
from vllm_medusa.training.inputs import DataError, Inputs, require_labels
from vllm_medusa.training.options import HeadOptions, TrainOptions
from vllm_medusa.training.recipe import Recipe
from vllm_medusa.training.state import TrainingRun
from vllm_medusa.training.target import Target
from vllm_medusa.training.texts import Texts
from vllm_medusa.training.trainer import Report
from vllm_medusa.training.workers import Workers


class Job:
    """One training in one process.

    Attributes:
        options: what was asked for.
        inputs: the target and the records.
        workers: the processes.
        progress: silent in all but the main process.
        texts: the records to train on, laid out.
        heldout: those to measure on; maybe none.
        dtype: what the target computes in.
        layers: of the target, whose inputs an EAGLE-3 drafter reads; none for heads.
        cache_dtype: what the states of the text to train on are kept in.
        recipe: how the heads are trained alone.
        settings: everything that the heads depend on, plain JSON; then also the draft vocabulary.

    """

    def __init__(
        self,
        options: TrainOptions,
        inputs: Inputs,
        workers: Workers,
        progress: Progress,
        command: Sequence[str],
    ) -> None:
        """Look at everything that can be refused before anything is made.

        Raises:
            DataError: texts without a label for some head.
            HeadsError: layers that the target doesn't have.

        """
        self.options, self.inputs, self.workers = options, inputs, workers
        self.progress, self._command = progress, command
        self.texts = Texts.of(inputs.train)
        self.heldout = Texts.of(inputs.heldout) if inputs.heldout else None
        files, count = options.files, options.heads.num_heads
        require_labels(self.texts, count, files.name(heldout=False))
        if self.heldout is not None:
            require_labels(self.heldout, count, f"held-out records of {files.name(heldout=True)}")
        self.layers: tuple[int, ...] = ()
        if options.heads.kind == "eagle3":
            depth = inputs.fingerprint["num_layers"]
            if depth is None:
                raise DataError(f"{inputs.source} doesn't say how many layers it has.")
            self.layers = choose_layers(options.heads.aux_layers, depth)
        device, wanted = workers.device, options.cache.cache_dtype
        self.dtype = target_dtype(options.machine.dtype, inputs.dtype, device)
        self.cache_dtype = self.dtype if wanted == "auto" else DTYPES[wanted]
        self.recipe = Recipe.of(
            options.training,
            bf16=_use_bf16(options.machine.precision, device),
            hidden_size=inputs.fingerprint["hidden_size"],
            num_labels=self.texts.num_labels,
            drafter=bool(self.layers),
        )
        self._state_key = {  # what hidden states depend on
            "target": inputs.fingerprint,
            "target_config": inputs.config,
            "dtype": str(self.dtype),
            "quantization": options.machine.quantization,
        }
        self.settings: dict[str, Any] = {
            "method": options.method,
            "target": inputs.fingerprint,
            "target_config": inputs.config,
            "data": {
                "train": digest_of(inputs.train),
                "heldout": digest_of(inputs.heldout) if inputs.heldout else None,
            },
            "heads": _shape(options.heads, self.layers),
            "recipe": asdict(self.recipe),
            "dtype": str(self.dtype),
            "quantization": options.machine.quantization,
            "cache": {"dtype": str(self.cache_dtype), "gb": options.cache.cache_gb},
        }

    @property
    def cache_bytes(self) -> int:
        """How much of hidden states may be kept."""
        return int(self.options.cache.cache_gb * 1e9)

    def open(self) -> TrainingRun:
        """Open the output's run; says so if it is complete."""
        files = self.options.files
        run = TrainingRun(
            files.output, self.settings, overwrite=files.overwrite, main=self.workers.main
        )
        if run.complete:
            self.progress.note(f"nothing to do; the heads are in {files.output}")
        return run

    def provenance(self) -> dict[str, Any]:
        """The heads' provenance; to be taken before training, which files may not outlast."""
        files = self.options.files
        data = [path for path in (files.data, files.heldout) if path is not None]
        return provenance(self._command, data) if self.workers.main else {}

    def load_target(self) -> Target:
        """The target as it was asked for."""
        return Target.load(
            self.inputs.source,
            dtype=self.dtype,
            device=self.workers.device,
            quantization=self.options.machine.quantization,
        )

    def new_heads(self, target: Target) -> MedusaHeads:
        """Heads as the options want them, untrained."""
        options, token_map = self.options.heads, self.token_map(target)
        return new_heads(
            target,
            options.num_heads,
            options.num_layers,
            lm_heads=options.lm_heads or "shared",
            token_map=token_map,
            kind=options.kind,
        )

    def token_map(self, target: Target) -> torch.Tensor | None:
        """The draft vocabulary that heads are to have, int64 [V_draft]; None: all of the target's.

        Said, and noted in `settings`.
        """
        size, known = self.options.heads.draft_vocab, target.vocab_size
        counts = count_tokens(self.inputs.train, known)
        if size is None:
            size = usual_size(self.inputs.train, known)
        if not size or size >= known:
            if known > LARGEST:
                self.progress.note(f"draft vocabulary: all {known} tokens (--draft-vocab)")
            return None
        ends = {token for token in target.end_tokens if token < known}
        token_map = frequent_tokens(counts, size, ends)
        told = {"size": size, "coverage": round(coverage(counts, token_map), 4)}
        text = f"{told['coverage']:.1%} of the generated tokens"
        if self.inputs.heldout:
            unseen = coverage(count_tokens(self.inputs.heldout, known), token_map)
            told["heldout_coverage"] = round(unseen, 4)
            text += f" and {unseen:.1%} of the held-out ones"
        self.settings["draft_vocab"] = told
        self.progress.note(f"draft vocabulary: {size} of {known} tokens, {text} (--draft-vocab)")
        return token_map

    def states(
        self,
        target: StateSource,
        texts: Texts,
        folder: Path,
        dtype: torch.dtype,
        max_bytes: int,
        *,
        heldout: bool | None = None,
        **key: Any,
    ) -> HiddenStates:
        """States of `texts` or `heldout`; ``key``: what isn't as it was asked for.

        ``heldout`` says which, where they are laid out in another way.
        """
        is_heldout = texts is self.heldout if heldout is None else heldout
        return HiddenStates(
            target,
            texts,
            folder,
            self._state_key | key,
            dtype=dtype,
            max_bytes=max_bytes,
            file=self.options.files.name(heldout=is_heldout),
        )

    def sources(
        self, target: StateSource, heldout: Texts | None, texts: Texts, run: TrainingRun, **key: Any
    ) -> list[HiddenStates]:
        """Plan the states of held-out text, if there is any, and of the text to train on."""
        folder, left = self.options.cache.cache or run.work, self.cache_bytes
        found: list[HiddenStates] = []
        for part in (heldout, texts):
            if part is not None:
                place = folder, self.cache_dtype, left
                found.append(self.states(target, part, *place, heldout=part is heldout, **key))
                left -= found[-1].cached_bytes
        return found

    def end(self, run: TrainingRun, sources: Sequence[HiddenStates]) -> None:
        """Remove what only this run needed."""
        for states in sources:
            states.release()
        self.workers.wait()
        if self.workers.main:
            for states in sources:
                if not self.options.cache.keep_cache:
                    states.remove()
            run.finish()

    def build(self, *sources: HiddenStates) -> None:
        """Compute the states that lack, after a look at the disk."""
        if self.workers.main:
            others = 0
            for states in sources:
                states.check_space(others)
                others += states.missing_bytes
        self.workers.wait()
        for states in sources:
            states.build(
                lambda ready, total: self.progress.at("hidden states", ready, total),
                rank=self.workers.rank,
                world=self.workers.world,
            )
        self.workers.wait()
        kept = sum(states.cached_bytes for states in sources)
        needed = sum(states.needed_bytes for states in sources)
        if kept < needed:
            self.progress.note(
                f"{kept / 1e9:.2f} of {needed / 1e9:.2f} GB of hidden states are kept; the rest is "
                "computed in every epoch"
            )

    def report(self, stage: str) -> Report:
        """Return what tells `progress` of a stage's steps."""
        return lambda step, steps, entry: self.progress.at(stage, step, steps, _line(entry))


def _shape(options: HeadOptions, layers: Sequence[int]) -> dict[str, Any]:
    """The heads' shape; runs begun when there were fewer kinds go on."""
    shape = asdict(options) | {"aux_layers": list(layers)}
    news = {"medusa": ("kind", "aux_layers"), "hydra": ("aux_layers",)}.get(options.kind, ())
    return {key: value for key, value in shape.items() if key not in news}


def _line(entry: dict[str, Any]) -> str:
    """A line of the log in a few words."""
    if "heldout" not in entry:
        own = f"; target's {entry['lm_loss']:.2g}" if "lm_loss" in entry else ""
        return "loss " + " ".join(f"{loss:.2f}" for loss in entry["losses"]) + own
    best = " ".join(f"{top[0]:.3f}" for top in entry["heldout"]["top"])
    lost = f"; KL {entry['quality']['kl']:.2g}" if "quality" in entry else ""
    return f"held-out top 1: {best}{lost}"


def target_dtype(choice: str, own: str | None, device: torch.device) -> torch.dtype:
    """What the target computes in: ``auto`` is its ``own`` on a GPU and float32 on a CPU."""
    if choice != "auto":
        return DTYPES[choice]
    return torch.float32 if device.type == "cpu" else DTYPES.get(own or "", torch.bfloat16)


def _use_bf16(choice: str, device: torch.device) -> bool:
    """Whether the heads compute in bfloat16: ``auto`` where the hardware multiplies it natively."""
    if choice != "auto":
        return choice == "bfloat16"
    if device.type == "cpu":
        return fast_bfloat16()
    return device.type == "cuda" and torch.cuda.is_bf16_supported()
