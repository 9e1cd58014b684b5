"""What `adapt` makes sure of before it begins: hours later would be too late."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_medusa.adapt.amounts import Amounts
from vllm_medusa.adapt.needs import announced, check_disk, measure, with_dtype
from vllm_medusa.adapt.options import AdaptOptions
from vllm_medusa.files import (
    digest,
    digest_json,
    read_json,
    refuse_strangers,
    require_parent,
)
from vllm_medusa.job import Progress
from vllm_medusa.offline.defaults import EnginePlan, TargetSizes, plan_engine
from vllm_medusa.offline.options import BatchOptions
from vllm_medusa.offline.prompts import load_prompts
from vllm_medusa.options import values_of
from vllm_medusa.training.options import TrainOptions

REPORT = "report.json"
# What adapt writes, so what it may replace.
OURS = (
    *("config.json", "model.safetensors", "calibration.safetensors", "target/"),
    *("accuracy.png", "budgets.png", "calibration.png", "curves.png", "tree.png"),
    *("report.md", REPORT),
)
_EXTRAS = {
    "vllm": "cpu",
    "transformers": "train",
    "matplotlib": "train",
    "peft": "train",
    "accelerate": "train",
}
_SMALL = 10**12  # tokens times bytes of weights: less is done before a trial would be


@dataclass(frozen=True)
class Plan:
    """An adapt that can begin: what is asked for, and what the checks found out."""

    options: AdaptOptions
    training: TrainOptions
    target: dict[str, Any]  # its fingerprint
    different: int  # prompts that differ in more than their names
    prompts_digest: str
    amounts: Amounts
    engine: EnginePlan  # of the texts
    small: bool = True  # done in minutes, so nothing is measured beforehand

    @property
    def key(self) -> str:
        """A digest of everything that the result depends on."""
        places = dict.fromkeys(("target", "prompts", "output", "overwrite", "work"))
        trained = values_of(self.training) | dict.fromkeys(("model", "data", "heldout", "output"))
        asked = [values_of(self.options) | places, trained]
        return digest_json([asked, self.target, self.prompts_digest])[:12]


def check(options: AdaptOptions, training: TrainOptions, progress: Progress) -> Plan:
    """Look at everything that is cheap to look at.

    Raises:
        ValueError: something has to be changed; the message says what.

    """
    _require_extras()
    _check_output(options)
    files = options.files
    prompts = load_prompts(files.prompts, files.format, files.column, files.on_bad_line, progress)
    different = len({(p.text, p.turns, json.dumps(p.history)) for p in prompts})
    if different < 2:
        raise ValueError(
            f"{files.prompts}: {different} different prompts; at least 2 are needed, one to train "
            "on and one held out, and a few hundred for heads worth having."
        )
    target = _read_target(options.target)
    options, training, why = with_dtype(options, training)
    sizes = TargetSizes.of(options.target, options.dtype)
    lengths = measure(prompts, options, sizes.positions, progress)
    texts = options.texts
    room = sizes.positions or max(length.positions(texts.max_tokens) for length in lengths)
    amounts = Amounts.of(lengths, texts.samples, texts.max_tokens, room)
    engine = plan_engine(
        options.target,
        [n.positions(texts.max_tokens) for n in lengths for _ in range(texts.samples)],
        texts.batch or BatchOptions.batch,
        options.engine_args.get("max_model_len"),
        dtype=options.dtype,
        tokens=amounts.written,
    )
    disk = check_disk(options, training, amounts, target, sizes)
    progress.note(announced(options, why, amounts, engine, disk))
    small = (amounts.prompt_tokens + amounts.written) * sizes.weights < _SMALL
    return Plan(options, training, target, different, digest(files.prompts), amounts, engine, small)


def written_by_adapt(folder: Path) -> str | None:
    """The key of the adapt whose heads a folder holds, or None."""
    try:
        return str(read_json(folder / REPORT)["key"])
    except (OSError, ValueError, KeyError):
        return None


def _require_extras() -> None:
    missing = [name for name in _EXTRAS if find_spec(name) is None]
    if missing:
        extras = ",".join(sorted({_EXTRAS[name] for name in missing}))
        raise ValueError(
            f"adapt needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            f"installed: pip install 'vllm-medusa[{extras}]'"
        )


def _check_output(options: AdaptOptions) -> None:
    """Refuse an output that can't be made, or that others need."""
    output, work = options.files.output, options.work_folder
    place = output.resolve()  # a link stays, and what it leads to is replaced
    if Path.cwd().is_relative_to(place):
        raise ValueError(
            f"--output {output} is the folder that this was started in, or one around it, and is "
            f"replaced as a whole. Name a folder in it, such as {output / 'heads'}."
        )
    for path in (output, place):
        require_parent(path)
    if work.resolve().is_relative_to(place):
        raise ValueError(
            f"--work {work} is in --output {output}, which is empty until the end and then "
            "replaced as a whole. Name another --work, or none: a folder beside the output."
        )
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file; name a folder for the heads.")
    if output.is_dir() and any(output.iterdir()) and written_by_adapt(output) is None:
        raise ValueError(
            f"{output} holds something that adapt did not write. Name another --output, or remove "
            "it yourself."
        )
    for source in (Path(options.target), options.files.prompts):
        if source.exists() and source.resolve().is_relative_to(place):
            raise ValueError(
                f"{source}, which is read, is in --output {output}, which is replaced as a whole. "
                "Name another --output."
            )
    if options.files.overwrite and place.is_dir():
        refuse_strangers(output, OURS)


def _read_target(target: str) -> dict[str, Any]:
    """Return the target's fingerprint; its config and tokenizer have to be readable too."""
    from transformers import AutoConfig, AutoTokenizer

    from vllm_medusa.heads.fingerprint import target_fingerprint

    folder = Path(target).expanduser()
    if folder.is_file():
        raise ValueError(
            f"{target} is a file; adapt needs a folder as transformers saves a model, with "
            "config.json, the tokenizer and safetensors. Of a GGUF file give the model that it was "
            "made from, or save it as such a folder: AutoModelForCausalLM.from_pretrained(FOLDER, "
            "gguf_file=NAME).save_pretrained(TARGET), and its tokenizer likewise."
        )
    if not folder.exists():
        _download(target)
    what = "config.json"
    try:
        config = AutoConfig.from_pretrained(target)
        what = "tokenizer"
        AutoTokenizer.from_pretrained(target)
    except Exception as error:  # transformers and its libraries raise anything
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{target} is not a model that can be read; its {what}: {reason:.300}"
        ) from None
    if config.is_encoder_decoder:
        raise ValueError(f"{target} is an encoder-decoder; heads need a decoder-only model.")
    return target_fingerprint(target)


def _download(name: str) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.model", "*.jinja"])
    except HFValidationError:
        raise ValueError(f"{name}: no such folder, and not a name of the hub either.") from None
    except Exception as error:  # of the network, of the hub, of its access rules
        raise ValueError(
            f"{name}: no such folder, and from the hub it can't be had: "
            f"{str(error).splitlines()[0]}"
        ) from None
