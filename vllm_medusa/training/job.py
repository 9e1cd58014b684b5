"""Common parts of all training methods: settings, the target, texts with their states, results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from vllm_medusa.files import fingerprint
from vllm_medusa.heads.checkpoint import provenance_of, save_drafter, save_heads
from vllm_medusa.heads.eagle_model import EagleDrafter, choose_layers
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.heads.provenance import provenance
from vllm_medusa.job import Progress
from vllm_medusa.offline.machine import fast_bfloat16
from vllm_medusa.offline.records import digest_of
from vllm_medusa.training import eagle3, medusa1
from vllm_medusa.training.draft_vocab import (
    LARGEST,
    count_tokens,
    coverage,
    default_size,
    frequent_tokens,
)
from vllm_medusa.training.hidden_cache import HiddenStates
from vllm_medusa.training.inputs import (
    find_start,
    identify,
    limits_of,
    read_texts,
    require_labels,
)
from vllm_medusa.training.loop import Report
from vllm_medusa.training.losses import AnyHeads
from vllm_medusa.training.method import Data, Method
from vllm_medusa.training.options import TrainOptions
from vllm_medusa.training.recipe import MEASURED_ROWS, complete
from vllm_medusa.training.rows import WHOLE, Texts
from vllm_medusa.training.run import TrainingRun
from vllm_medusa.training.target import DTYPES, Target, stored_dtype, target_dtype
from vllm_medusa.training.workers import Workers

# keys of a target's config.json that do not affect its hidden states, or are recorded elsewhere
_IGNORED_KEYS = (
    *("_name_or_path", "architectures", "transformers_version"),
    *("dtype", "torch_dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("id2label", "label2id", "medusa", "medusa_2"),
)


class Job:
    """One training run in one process.

    Attributes:
        options: the given ones, with the shape of the heads in ``start``.
        start: the heads to continue from; None: new ones.
        source: the target's folder or hub name.
        fingerprint: of the target's weights, see `heads.fingerprint.target_fingerprint`.
        stored: dtype of the target's weights, if it is in its config.
        dtype: dtype in which the target computes.
        bf16: whether the heads compute in bfloat16.
        train, heldout: the texts to train and to measure on; their prompts differ.
        layers: target layers whose inputs an EAGLE-3 drafter reads; empty for heads.
        step_options: options for training only the heads.
        recorded: everything that the heads depend on, plain JSON; later also the draft vocabulary.

    """

    def __init__(
        self,
        options: TrainOptions,
        workers: Workers,
        progress: Progress,  # silent in all but the main process
        command: Sequence[str],
    ) -> None:
        """Read everything except the target's weights; nothing is created.

        Raises ValueError: see `find_start`, `identify` and `read_texts`; some head has no labels,
        or the target lacks one of the layers.
        """
        heads, self.start = find_start(options.heads)
        self.options = options = replace(options, heads=heads)
        self.workers, self.source = workers, options.model
        self.progress, self._command = progress, command
        files, machine, count = options.files, options.machine, options.heads.num_heads
        config, self.fingerprint, target_config = identify(self.source)
        self.stored = stored_dtype(config)
        texts = read_texts(options, limits_of(self.source, config), progress)
        self.train, self.heldout = map(Texts, texts)
        require_labels(self.train, count, files.name(heldout=False))
        if self.heldout.records:
            require_labels(self.heldout, count, f"held-out records of {files.name(heldout=True)}")
        self.layers: tuple[int, ...] = ()
        if options.heads.kind == "eagle3":
            depth = self.fingerprint["num_layers"]
            if depth is None:
                raise ValueError(f"{self.source} has no number of layers in its config.")
            self.layers = choose_layers(options.heads.aux_layers, depth)
        self.dtype = target_dtype(machine.dtype, self.stored, workers.device)
        self.bf16 = _use_bf16(machine.precision, workers.device)
        self.step_options = complete(
            options.training,
            hidden_size=self.fingerprint["hidden_size"],
            num_labels=self.train.count_labels(),
            drafter=bool(self.layers),
        )
        self._state_key = {  # what hidden states depend on
            "target": self.fingerprint,
            "target_config": {k: v for k, v in target_config.items() if k not in _IGNORED_KEYS},
            "dtype": str(self.dtype),
            "quantization": machine.quantization,
        }
        start = options.heads.start_heads
        self.recorded: dict[str, Any] = {
            "method": options.method,
            **self._state_key,
            "data": {
                "train": digest_of(self.train.records),
                "heldout": digest_of(texts[1]) if texts[1] else None,
            },
            "heads": asdict(options.heads)
            | {"aux_layers": list(self.layers)}
            | {"start_heads": None if start is None else fingerprint(start)},
            "recipe": asdict(self.step_options) | {"bf16": self.bf16},
            "cache_gb": options.cache.cache_gb,
        }

    def open(self) -> TrainingRun:
        """Open the run in the output folder; prints a note if it is complete."""
        files = self.options.files
        main = self.workers.main
        run = TrainingRun(files.output, self.recorded, overwrite=files.overwrite, main=main)
        self.workers.wait()  # until the main process has applied --overwrite
        if run.complete:
            self.progress.note(f"nothing to do; the heads are in {files.output}")
        elif main:  # before training, because files may be removed later
            data = [path for path in (files.data, files.heldout) if path is not None]
            self._origin = [provenance(self._command, data)]
            self._tokens: int | None = sum(r.num_generated for r in self.train.records)
            if self.start is not None:
                about = self.start.config.get("medusa") or {}
                self._origin[:0] = provenance_of(about)
                before = about.get("training", {}).get("tokens")
                self._tokens = None if before is None else self._tokens + before
        return run

    def load_target(self, source: str | Path | None = None, *, quantized: bool = True) -> Target:
        """Load the target, or the model ``source``, with the requested settings."""
        return Target.load(
            source or self.source,
            dtype=self.dtype,
            device=self.workers.device,
            quantization=self.options.machine.quantization if quantized else None,
        )

    def first_heads(self, target: Target) -> MedusaHeads:
        """The Medusa or Hydra heads to start from: new ones, or ``start``."""
        if self.start is not None:
            return medusa1.load_for(target, self.start, torch.float32)
        return medusa1.new_heads(target, self.options.heads, self.token_map(target))

    def first_drafter(self, target: Target) -> EagleDrafter:
        """The EAGLE-3 drafter to start from: a new one, or ``start``."""
        heads = self.options.heads
        if self.start is not None:
            return eagle3.load_drafter(target, self.start, self.layers, heads.num_heads)
        return eagle3.new_drafter(
            target,
            self.layers,
            heads.num_heads,
            self.token_map(target),
            frozen_lm_head=not heads.own_lm_heads,
            seed=self.step_options.seed,
        )

    def create_method(self, target: Target, run: TrainingRun) -> Method:
        """Medusa-1 or EAGLE-3 with new heads, on computed states."""
        options, workers, steps = self.options, self.workers, self.step_options
        source: Any = target
        size = medusa1.PIECE_ROWS
        if whole := bool(self.layers):
            source, size = eagle3.AuxiliaryStates(target, self.layers), eagle3.PIECE_ROWS
            shown = ", ".join(map(str, self.layers))
            self.progress.note(f"the drafter reads the inputs of the target's layers {shown}")
        assert steps.batch_tokens
        pieces = self.train.cut(min(size, steps.batch_tokens), whole=whole)
        cache = options.cache.cache
        states = HiddenStates(
            source,
            self.train,
            pieces if cache is None else self.train.cut(WHOLE, whole=True),
            cache or run.work,
            self._state_key,
            dtype=self.dtype,
            max_bytes=int(options.cache.cache_gb * 1e9),
            file=options.files.name(heldout=False),
        )
        states.build(
            lambda ready, total: self.progress.at("hidden states", ready, total),
            rank=workers.rank,
            world=workers.world,
        )
        workers.wait()
        kept, needed = states.cached_bytes, states.needed_bytes
        if kept < needed:
            self.progress.note(
                f"{kept / 1e9:.2f} of {needed / 1e9:.2f} GB of hidden states are kept; the rest is "
                "computed in every epoch"
            )
        data, heldout = Data(self.train, pieces, states), None
        if self.heldout.records:
            heldout = self.heldout_data(source, size, whole=whole)
        if whole:
            steps = replace(steps, batch_tokens=max(steps.batch_tokens, *data.lengths))
        setup = data, heldout, steps, workers, self.bf16
        if whole:
            return eagle3.Eagle3(target, self.first_drafter(target), *setup)
        return medusa1.Medusa1(target, self.first_heads(target), *setup)

    def heldout_data(
        self, source: Any, size: int, *, whole: bool = False, share: bool = True
    ) -> Data:
        """The held-out pieces to measure on (this process's share), with states in memory."""
        pieces = self.heldout.cut(size, whole=whole)
        stride = -(-sum(piece.num_rows for piece in pieces) // MEASURED_ROWS)
        chosen = pieces[::stride]
        if share:
            chosen = chosen[self.workers.rank :: self.workers.world]
        name = self.options.files.name(heldout=True)
        states = HiddenStates(source, self.heldout, chosen, dtype=self.dtype, file=name)
        states.build()
        del states.target  # all states are stored, so the model may be released
        return Data(self.heldout, chosen, states)

    def token_map(self, target: Target) -> torch.Tensor | None:
        """The heads' draft vocabulary, int64 [V_draft]; None: all of the target's.

        It is printed, and added to `recorded`.
        """
        size, known = self.options.heads.draft_vocab, target.vocab_size
        if size is None:
            size = default_size(self.train.records, known)
        if not size or size >= known:
            if known > LARGEST:
                self.progress.note(f"draft vocabulary: all {known} tokens (--draft-vocab)")
            return None
        counts = count_tokens(self.train.records, known)
        ends = {token for token in target.end_tokens if token < known}
        token_map = frequent_tokens(counts, size, ends)
        covered = {"size": size, "coverage": round(coverage(counts, token_map), 4)}
        text = f"covering {covered['coverage']:.1%} of the generated tokens"
        if self.heldout.records:
            unseen = coverage(count_tokens(self.heldout.records, known), token_map)
            covered["heldout_coverage"] = round(unseen, 4)
            text += f" and {unseen:.1%} of the held-out ones"
        self.recorded["draft_vocab"] = covered
        self.progress.note(f"draft vocabulary: {size} of {known} tokens, {text} (--draft-vocab)")
        return token_map

    def release(self, method: Method) -> None:
        """Remove the states, unless they are in the user's own folder."""
        self.workers.wait()
        if self.workers.main and self.options.cache.cache is None and method.data.states:
            method.data.states.remove()

    def report(self, stage: str) -> Report:
        """Return a function that reports a stage's steps to `progress`."""
        return lambda step, steps, entry: self.progress.at(stage, step, steps, _line(entry))

    def round(self, heads: AnyHeads) -> None:
        """Round every weight to the stored dtype, so that heads are measured as stored."""
        dtype = DTYPES[self.options.heads.save_dtype]
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.copy_(parameter.to(dtype))

    def save(
        self,
        heads: AnyHeads,  # `round`ed; moved to the CPU in the stored dtype
        more: Mapping[str, Any],  # results, in addition to `recorded`
        target: Mapping[str, Any] | None = None,  # fingerprint, if not `fingerprint`
        source: str | Path | None = None,  # the target's location, if not `source`
    ) -> None:
        """Write the heads; ``config.json`` is written last and marks them complete."""
        heads.to(device="cpu", dtype=DTYPES[self.options.heads.save_dtype])
        name = str(source or self.source)
        if Path(name).is_absolute():  # a local path is meaningless on other machines
            name = Path(name).name
        config = {
            "base_model_name_or_path": name,
            "target": dict(target or self.fingerprint),
            # tokens: generated ones, of all trainings of these heads; None: unknown
            "training": self.recorded | {"tokens": self._tokens} | dict(more),
            "provenance": self._origin,
        }
        if isinstance(heads, EagleDrafter):
            save_drafter(self.options.files.output, heads, config)
        else:
            save_heads(self.options.files.output, heads, config)


def _line(entry: dict[str, Any]) -> str:
    """Summarize a line of the log."""
    if "heldout" not in entry:
        own = f"; target's {entry['lm_loss']:.2g}" if "lm_loss" in entry else ""
        return "loss " + " ".join(f"{loss:.2f}" for loss in entry["losses"]) + own
    best = " ".join(f"{top[0]:.3f}" for top in entry["heldout"]["top"])
    lost = f"; KL {entry['quality']['kl']:.2g}" if "quality" in entry else ""
    return f"held-out top 1: {best}{lost}"


def _use_bf16(choice: str, device: torch.device) -> bool:
    """Whether the heads compute in bfloat16; ``auto``: if the hardware supports it natively."""
    if choice != "auto":
        return choice == "bfloat16"
    if device.type == "cpu":
        return fast_bfloat16()
    return device.type == "cuda" and torch.cuda.is_bf16_supported()
