"""A trained adapter and its target made one model: a folder that transformers and vLLM load.

The target is read again from where it came, in the dtype of its files, so that a backbone that
computed in another dtype or was quantised for training gives the same result, and so that the
adapter's folder alone is enough, today or next year.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_medusa.files import new_folder
from vllm_medusa.training.lora import LoraError, adaptable_modules, merge

if TYPE_CHECKING:
    from peft import PeftModel

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")
_OWN = ("config.json", "README.md")  # written anew; about another model


def save_adapter(adapted: PeftModel, folder: Path) -> Path:
    """Write the adapter in peft's format, whole or not at all; returns the folder."""
    with new_folder(folder, overwrite=True) as part:
        adapted.save_pretrained(str(part), save_embedding_layers=False)
        (part / "README.md").unlink(missing_ok=True)  # peft's card holds nothing but blanks
    return folder


def merge_adapter(source: str | Path, adapter: str | Path, folder: Path) -> Path:
    """Write the target ``source`` with a `save_adapter` folder merged into it; returns the folder.

    The folder gets the weights in the dtype of the target's files, each sum rounded once, the
    config, the generation config and, from a local target, every other file (tokenizer, chat
    template, licence). It appears whole or not at all; an older one there is replaced.

    Raises:
        LoraError: the target can't be loaded, is quantised, or the sums are not finite.

    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(str(source), dtype="auto")
    except (OSError, ValueError, ImportError) as error:
        raise LoraError(f"{source} can't be loaded to be merged: {error}") from error
    if getattr(model, "quantization_method", None) is not None:
        raise LoraError(
            f"{source} is stored quantised, and an adapter can't be merged into that without loss. "
            "Keep the adapter (--save adapter), or train on the unquantised model"
        )
    adaptable_modules(model)  # refuses the folder of an adapter, which transformers loads too
    merged = merge(PeftModel.from_pretrained(model, str(adapter)))
    with new_folder(folder, overwrite=True) as part:
        merged.save_pretrained(part)
        _copy_rest(source, part)
    return folder


def _copy_rest(source: str | Path, folder: Path) -> None:
    if not Path(source).is_dir():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(str(source)).save_pretrained(folder)
        return
    for file in sorted(Path(source).iterdir()):
        stored = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
        if file.is_file() and not (stored or file.name in _OWN or file.name.startswith(".")):
            shutil.copyfile(file, folder / file.name)
