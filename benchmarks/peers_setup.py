"""Environments, model files and processes of other engines, for `benchmarks.peers`.

Environments (virtual environments with packages from pip's index) and files are made once and kept.
Models are exported as each engine requires: by optimum-intel for OpenVINO, by llama.cpp's own
script as a GGUF file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import metadata
from itertools import accumulate, chain, pairwise
from pathlib import Path
from threading import Timer
from typing import Any

from safetensors.torch import load_file, save_file

from benchmarks.engines import ArmSampling, answer_limit
from demo.packed import int8_rows
from vllm_medusa.convert.job import convert
from vllm_medusa.convert.options import ConvertOptions
from vllm_medusa.files import digest_json, fingerprint, new_folder, new_path, read_json
from vllm_medusa.heads.eagle_checkpoint import default_layers
from vllm_medusa.heads.eagle_tensors import LAYER_IDS
from vllm_medusa.job import JobFailed, Progress
from vllm_medusa.offline.batch import Answer, Result
from vllm_medusa.offline.children import end_of
from vllm_medusa.offline.prompts import Prompt

REQUIREMENTS = {
    "openvino": (
        "openvino-genai==2026.4.1.0",
        "optimum-intel==2.2.0",
        *("diffusers", "einops", "huggingface-hub<1.22"),  # for optimum-intel's EAGLE-3
        f"torch=={metadata.version('torch')}",  # the build used here, without CUDA on CPUs
    ),
    "llama.cpp": ("llama-cpp-python==0.3.36",),  # compiled
}
_VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_SHOWN_LINES = 5
_MAX_SECONDS = 1800.0  # for an answer; then the process is killed
_SET_LAYERS = """
import sys, openvino
model = openvino.Core().read_model(sys.argv[1] + "/openvino_model.xml")
model.set_rt_info(sys.argv[3], ["hidden_layers_list"])
openvino.save_model(model, sys.argv[2] + "/openvino_model.xml", compress_to_fp16=False)
"""


class Worker:
    """`peers_worker` in a process, an `in_turn.Runner`; made by `worker`."""

    def __init__(self, process: subprocess.Popen[str], log: Path, settings: dict[str, Any]):
        """Wait for the engine. Raises JobFailed: it failed; the message has the end of its log."""
        self.sampling = ArmSampling()  # of later runs; may be replaced
        self.pid = process.pid
        self._process, self._log, self._eos = process, log, set(settings["eos"])
        self.version: str = self._ask(settings)["version"]

    def _ask(self, message: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        limit = Timer(_MAX_SECONDS, self._process.kill)
        limit.start()
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline() or "{}")
        except (BrokenPipeError, json.JSONDecodeError):  # it ended
            answer = {}
        finally:
            late = not limit.is_alive()
            limit.cancel()
        if not answer or "error" in answer:
            reason = answer.get("error") or f"it ended with status {self._process.wait()}"
            reason = f"no answer within {_MAX_SECONDS:g} s" if late else reason
            raise JobFailed(f"{reason}; the end of its log:\n{end_of(self._log)}")
        return answer

    def run(
        self, prompts: Sequence[Prompt], concurrency: int, seed: int | None
    ) -> tuple[list[Result], float]:
        """See `vllm_medusa.offline.in_turn.Runner`."""
        found = self._ask(
            {
                "prompts": [prompt.token_ids for prompt in prompts],
                "seeds": [(seed or 0) + prompt.index for prompt in prompts],
                "limits": [answer_limit(prompt, self.sampling.max_tokens) for prompt in prompts],
                "temperature": self.sampling.temperature,
                "concurrency": concurrency,
            }
        )
        answers = zip(prompts, found["answers"], strict=True)
        return [Result(p, (self._answer(p, steps),)) for p, steps in answers], found["seconds"]

    def _answer(self, prompt: Prompt, steps: list[list[int]]) -> Answer:
        """An answer up to its first EOS token or the limit, as vLLM counts it."""
        limit = answer_limit(prompt, self.sampling.max_tokens)
        ids = list(chain.from_iterable(steps))[:limit]
        ends = [n for n, token in enumerate(ids, start=1) if token in self._eos]
        if not ends and len(ids) < limit:
            raise ValueError(f"an answer ended after {len(ids)} tokens without EOS")
        ids = ids[: ends[0]] if ends else ids
        totals = [min(total, len(ids)) for total in accumulate(map(len, steps), initial=0)]
        delivered = [after - before for before, after in pairwise(totals)]
        return Answer(
            prompt_token_ids=prompt.token_ids,
            token_ids=ids,
            delivered=[count for count in delivered if count > 0],
            finish_reason="stop" if ends else "length",
        )


@contextmanager
def worker(settings: dict[str, Any], folder: Path, progress: Progress) -> Iterator[Worker]:
    """A started engine; its environment and files are made in ``folder`` if needed.

    For ``settings`` see `peers_worker`; "target" and "drafter" are folders in their usual formats.

    Raises JobFailed: a command failed; the message has the command and the end of its output.
    """
    python, files = prepare(settings, folder, progress)
    own = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(len(settings["cores"]))}
    command = [str(python), "-I", str(Path(__file__).with_name("peers_worker.py"))]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        tempfile.NamedTemporaryFile(prefix="vllm-medusa-") as log,
        subprocess.Popen(command, stderr=log, env=own, **pipes) as process,
    ):
        try:
            yield Worker(process, Path(log.name), settings | files)
        finally:
            process.kill()
            with suppress(BrokenPipeError):  # the engine ended without reading its input
                process.stdin.close()  # type: ignore[union-attr]


def prepare(
    settings: dict[str, Any], folder: Path, progress: Progress
) -> tuple[Path, dict[str, str]]:
    """The Python of an engine, and the target and drafter in the formats that it requires."""
    engine, weights, target = settings["engine"], settings["weights"], Path(settings["target"])
    if engine == "transformers":
        return Path(sys.executable), {}
    python = _environment(folder, engine, progress)

    made = partial(_made, folder=folder, engine=engine, progress=progress)
    if engine == "llama.cpp":
        return python, {"target": made(target, ".gguf", partial(_write_gguf, python, target))}
    files = {"target": made(target, f"-{weights}", partial(_export, python, weights, target))}
    if "drafter" in settings:
        drafter = Path(settings["drafter"])
        write = partial(_export_drafter, python, weights, drafter, target)
        files["drafter"] = made(drafter, f"-{weights}", write)
    return python, files


def _made(
    source: Path,
    suffix: str,
    write: Callable[[Path], None],
    *,
    folder: Path,
    engine: str,
    progress: Progress,
) -> str:
    """A model's path in another format; it is written if needed."""
    path = folder / "models" / f"{source.name}-{fingerprint(source)[:12]}{suffix}"
    if not path.exists():
        progress.note(f"{engine}: writing {path}, once")
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    return str(path)


def quantized(target: Path, folder: Path, progress: Progress) -> Path:
    """The target with int8 weights per channel and int8 activations per token, for vLLM.

    Weights are rounded to the nearest, without calibration; the embedding and the LM head stay as
    they are. The format is that of compressed-tensors.
    """
    write = partial(_quantize, target)
    return Path(_made(target, "-w8a8", write, folder=folder, engine="vLLM", progress=progress))


def _quantize(target: Path, path: Path) -> None:
    tensors = {}
    for file in target.glob("*.safetensors"):
        for name, weight in load_file(file).items():
            if ".layers." not in name or weight.dim() != 2:
                tensors[name] = weight
                continue
            tensors[name], tensors[f"{name}_scale"] = int8_rows(weight)
    each = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": each | {"strategy": "channel", "dynamic": False},
        "input_activations": each | {"strategy": "token", "dynamic": True},
    }
    config = read_json(target / "config.json")
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    with new_folder(path) as part:
        shutil.copytree(
            target, part, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*")
        )
        save_file(tensors, part / "model.safetensors", {"format": "pt"})
        (part / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _environment(folder: Path, engine: str, progress: Progress) -> Path:
    """The Python of an environment, which is made if needed."""
    wanted = REQUIREMENTS[engine]
    made = folder / f"{engine}-{digest_json(wanted)[:8]}"
    python, complete = made / "bin" / "python", made / "complete"
    if not complete.exists():
        progress.note(f"{engine}: installing {', '.join(wanted)} in {made}, some minutes, once")
        venv.create(made, with_pip=True, clear=True)
        _run(python, "-m", "pip", "install", "--quiet", *wanted)
        if engine == "openvino":  # optimum-intel requires it for images; a CUDA build can't load
            _run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision")
        complete.touch()
    return python


def _export(python: Path, weights: str, source: Path, path: Path, *more: str) -> None:
    command = ("export", "openvino", "--model", source, "--task", "text-generation-with-past")
    with new_folder(path) as part:
        _run(python.with_name("optimum-cli"), *command, "--weight-format", weights, *more, part)


def _export_drafter(python: Path, weights: str, drafter: Path, target: Path, path: Path) -> None:
    """Export an EAGLE-3 drafter.

    optimum-intel reads AngelSlim's layout, which is `convert`'s native one, without variants. GenAI
    reads the outputs of the target's layers in the model's ``hidden_layers_list``
    (eagle3_model_transforms.cpp). A drafter's layer ids refer to inputs of layers, which are the
    outputs of the layers before.
    """
    with tempfile.TemporaryDirectory() as scratch, new_folder(path) as part:
        native, exported = Path(scratch, "native"), Path(scratch, "exported")
        convert(ConvertOptions(source=str(drafter), to="native", output=native))
        config = read_json(native / "config.json")
        if unknown := [name for name in _VARIANTS if config.get(name)]:
            raise JobFailed(f"optimum-intel does not support {', '.join(unknown)}")
        _export(python, weights, native, exported, "--trust-remote-code")
        depth = read_json(target / "config.json")["num_hidden_layers"]
        layers = [str(layer - 1) for layer in config.get(LAYER_IDS) or default_layers(depth)]
        _run(python, "-c", _SET_LAYERS, exported, part, " ".join(layers))
        for file in exported.glob("*.json"):
            (part / file.name).write_bytes(file.read_bytes())


def _write_gguf(python: Path, target: Path, path: Path) -> None:
    """Write a target as a GGUF file, with the script in llama-cpp-python's source archive."""
    (requirement,) = REQUIREMENTS["llama.cpp"]
    with tempfile.TemporaryDirectory() as scratch, new_path(path) as part:
        how = ("--quiet", "--no-deps", "--no-binary", requirement.split("==")[0])
        _run(python, "-m", "pip", "download", *how, "--dest", scratch, requirement)
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as file:
            file.extractall(scratch, filter="data")
        (script,) = Path(scratch).glob("*/vendor/llama.cpp/convert_hf_to_gguf.py")
        _run(sys.executable, script, target, "--outtype", "f16", "--outfile", part)


def _run(*command: str | Path) -> None:
    """Run a command. Raises JobFailed: it failed."""
    own = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        end = "\n".join(done.stdout.splitlines()[-_SHOWN_LINES:])
        shown = " ".join(str(word) for word in command if word != _SET_LAYERS)
        raise JobFailed(f"status {done.returncode} from: {shown}; the end of its output:\n{end}")
