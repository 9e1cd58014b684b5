"""Environments and model files of other engines, for `benchmarks.peers`; made once and kept.

An environment is a virtual environment with wheels of pip's index. Models are exported as each
engine requires: by optimum-intel for OpenVINO, as a GGUF file for llama.cpp.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_medusa.convert.job import convert
from vllm_medusa.convert.options import ConvertOptions
from vllm_medusa.files import digest_json, fingerprint, new_folder, new_path, read_json
from vllm_medusa.heads.eagle import default_layers
from vllm_medusa.heads.eagle_tensors import LAYER_IDS
from vllm_medusa.job import JobFailed, Progress

REQUIREMENTS = {
    # the last two are imported by optimum-intel's module with EAGLE-3
    "openvino": ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "diffusers", "einops"),
    "llama.cpp": ("llama-cpp-python==0.3.36",),  # compiled
}
_VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_SHOWN_LINES = 5
_SET_LAYERS = """
import sys, openvino
model = openvino.Core().read_model(sys.argv[1] + "/openvino_model.xml")
model.set_rt_info(sys.argv[3], ["hidden_layers_list"])
openvino.save_model(model, sys.argv[2] + "/openvino_model.xml", compress_to_fp16=False)
"""


def prepare(
    folder: Path,  # of environments and models
    engine: str,  # a key of `peers_worker.ENGINES`
    weights: str,  # OpenVINO's: fp16 or int8
    target: Path,
    drafter: Path | None,  # an EAGLE-3 drafter
    progress: Progress,
) -> tuple[Path, dict[str, str]]:
    """The Python of an engine, and its files by the names of `peers_worker`'s settings.

    Raises:
        JobFailed: a command failed; the message has the command and the end of its output.

    """
    if engine == "transformers":
        return Path(sys.executable), {"target": str(target)}
    python, models = _environment(folder, engine, progress), folder / "models"
    models.mkdir(parents=True, exist_ok=True)

    def made(source: Path, suffix: str, write: Any) -> str:
        path = models / f"{source.name}-{fingerprint(source)[:12]}{suffix}"
        if not path.exists():
            progress.note(f"{engine}: writing {path}, once")
            write(path)
        return str(path)

    if engine == "llama.cpp":
        return python, {"target": made(target, ".gguf", lambda path: _write_gguf(target, path))}

    def export(path: Path) -> None:
        with new_folder(path) as part:
            _export(python, target, part, weights)

    def export_drafter(path: Path) -> None:
        assert drafter is not None
        _export_drafter(python, drafter, target, path, weights)

    files = {"target": made(target, f"-{weights}", export)}
    if drafter is not None:
        files["drafter"] = made(drafter, f"-{weights}", export_drafter)
    return python, files


def _environment(folder: Path, engine: str, progress: Progress) -> Path:
    """The Python of an environment, which is made if needed."""
    wanted = list(REQUIREMENTS[engine])
    if engine == "openvino":  # the same build of torch as here, without CUDA packages on CPUs
        wanted.append(f"torch=={metadata.version('torch')}")
    made = folder / f"{engine}-{digest_json(wanted)[:8]}"
    python, complete = made / "bin" / "python", made / "complete"
    if not complete.exists():
        progress.note(f"{engine}: installing {', '.join(wanted)} in {made}, some minutes, once")
        venv.create(made, with_pip=True, clear=True)
        _run([str(python), "-m", "pip", "install", "--quiet", *wanted])
        if engine == "openvino":  # optimum-intel requires it for images; a CUDA build can't load
            _run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision"])
        complete.touch()
    return python


def _export(python: Path, source: Path, output: Path, weights: str, *more: str) -> None:
    command = [str(python.with_name("optimum-cli")), "export", "openvino", "--model", str(source)]
    command += ["--task", "text-generation-with-past", "--weight-format", weights]
    _run([*command, *more, str(output)])


def _export_drafter(python: Path, drafter: Path, target: Path, path: Path, weights: str) -> None:
    """Export an EAGLE-3 drafter.

    optimum-intel reads AngelSlim's layout, which is `convert`'s native one, without variants. GenAI
    reads the outputs of the target's layers in the model's ``hidden_layers_list``
    (eagle3_model_transforms.cpp); a drafter's numbers mean inputs, outputs of the layers before.
    """
    with tempfile.TemporaryDirectory() as scratch, new_folder(path) as part:
        native, exported = Path(scratch, "native"), Path(scratch, "exported")
        convert(ConvertOptions(source=str(drafter), to="native", output=native))
        config = read_json(native / "config.json")
        if unknown := [name for name in _VARIANTS if config.get(name)]:
            raise JobFailed(f"optimum-intel does not support {', '.join(unknown)}")
        _export(python, native, exported, weights, "--trust-remote-code")
        depth = read_json(target / "config.json")["num_hidden_layers"]
        layers = [str(layer - 1) for layer in config.get(LAYER_IDS) or default_layers(depth)]
        _run([str(python), "-c", _SET_LAYERS, str(exported), str(part), " ".join(layers)])
        for file in exported.glob("*.json"):
            (part / file.name).write_bytes(file.read_bytes())


def _write_gguf(target: Path, file: Path) -> None:
    """Write a Llama target as a GGUF file with F16 weights and no tokenizer.

    Rows of the query and key projections are interleaved, as llama.cpp's rotary embedding expects.
    """
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    config = model.config
    if config.model_type != "llama":
        raise JobFailed(f"only Llama targets are written as GGUF; {target} is {config.model_type}")
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    with new_path(file) as path:
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(heads["q_proj"])
        writer.add_head_count_kv(heads["k_proj"])
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
        writer.add_tokenizer_model("no_vocab")
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            rows, count = tensor.numpy(), heads.get(name.split(".")[-2])
            if count is not None:  # [heads, 2, D/2, H] -> [heads, D/2, 2, H]
                rows = rows.reshape(count, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
            own: Any = names.get_name(name, try_suffixes=(".weight",))
            writer.add_tensor(own, rows if rows.ndim == 1 else rows.astype("float16"))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _run(command: Sequence[str]) -> None:
    """Run a command. Raises JobFailed: it failed."""
    own = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        end = "\n".join(done.stdout.splitlines()[-_SHOWN_LINES:])
        shown = " ".join(word for word in command if "\n" not in word)
        raise JobFailed(f"status {done.returncode} from: {shown}; the end of its output:\n{end}")
