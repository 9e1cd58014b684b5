"""One engine of `benchmarks.peers` in a process of its own: JSON lines on stdin and stdout.

It runs in the engine's environment, which has neither vLLM nor this package, and imports only the
standard library and the engine. The first line has settings: "engine"; "cores"; "target", a folder
or file; "dtype", a name in torch; "eos", the ids that end an answer; "knobs", the engine's own
options of speculation; and what one engine needs. The reply is {"version": text}. Later lines are
groups of requests:

    {"prompts": [[id, ...], ...], "seeds": [int, ...], "limits": [int, ...], "concurrency": 4,
     "temperature": 0.7}

"limits" are max tokens.

The reply has {"seconds": float, "answers": ...}: for each prompt, the token ids of each step, the
prefill first. A reply {"error": text} says why there are none.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from importlib import metadata
from types import SimpleNamespace
from typing import Any

Steps = list[list[int]]  # token ids of each step of one answer
Requests = list[tuple[list[int], int, int]]  # prompts, seeds, and max tokens
HINTS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # OpenVINO's names


class Transformers:
    """``generate`` of transformers."""

    def __init__(self, settings: dict[str, Any]):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(len(settings["cores"]))
        self.torch, self.eos, self.knobs = torch, settings["eos"], settings["knobs"]
        dtype = getattr(torch, settings["dtype"])
        self.model: Any = AutoModelForCausalLM.from_pretrained(settings["target"], dtype=dtype)
        self.version = f"transformers {metadata.version('transformers')}, {settings['dtype']}"

    def generate(self, requests: Requests, concurrency: int, temperature: float) -> Iterator[Steps]:
        """The steps of each answer, one answer after the other, whatever the concurrency."""
        from transformers import GenerationConfig

        how = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        how |= {"eos_token_id": self.eos, "pad_token_id": self.eos[0], **self.knobs}
        config = GenerationConfig(do_sample=temperature > 0, **how)
        received: list[Any] = []
        streamer: Any = SimpleNamespace(put=received.append, end=lambda: None)
        for prompt, seed, limit in requests:
            received.clear()
            config.max_new_tokens = limit
            self.torch.manual_seed(seed)
            ids = self.torch.tensor([prompt])
            mask = self.torch.ones_like(ids)
            self.model.generate(
                ids, attention_mask=mask, generation_config=config, streamer=streamer
            )
            yield [step.flatten().tolist() for step in received[1:]]  # the first is the prompt


class OpenVino:
    """The continuous batching of OpenVINO GenAI; "weights" are fp16 or int8.

    "drafter" is the folder of an EAGLE-3 drafter, if any. The knobs are explained in GenAI's
    documentation, concepts/optimization-techniques/speculative-decoding.
    """

    def __init__(self, settings: dict[str, Any]):
        import numpy
        import openvino
        import openvino_genai as genai

        self.numpy, self.tensor, self.genai = numpy, openvino.Tensor, genai
        self.eos, self.knobs, self.requests = settings["eos"], settings["knobs"], 0
        hint = HINTS[settings["dtype"]]
        own = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": len(settings["cores"])}
        if settings["weights"] != "int8":  # by default, the cache has 8 bits
            own["KV_CACHE_PRECISION"] = "f32" if hint == "f32" else "f16"
        more: dict[str, Any] = {"prompt_lookup": True} if "max_ngram_size" in self.knobs else {}
        if settings.get("drafter"):
            more["draft_model"] = genai.draft_model(settings["drafter"], "CPU", **own)
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 1  # GB
        scheduler.enable_prefix_caching = False  # the same prompts are repeated
        scheduler.dynamic_split_fuse = False  # prompts are not chunked
        scheduler.max_num_batched_tokens = 1 << 15
        pipeline = genai.ContinuousBatchingPipeline
        self.pipeline: Any = pipeline(settings["target"], scheduler, "CPU", own | more)
        self.version = f"OpenVINO GenAI {metadata.version('openvino-genai')}, {hint}"

    def generate(self, requests: Requests, concurrency: int, temperature: float) -> list[Steps]:
        """The steps of all answers; ``concurrency`` requests run at a time."""
        waiting = list(enumerate(requests))[::-1]
        running: dict[int, Any] = {}  # handles by request
        answers = [Steps() for _ in requests]
        while waiting or running:
            while waiting and len(running) < concurrency:
                place, (prompt, seed, limit) = waiting.pop()
                how = {"temperature": temperature, "rng_seed": seed} if temperature else {}
                how |= {"max_new_tokens": limit, "do_sample": temperature > 0, **self.knobs}
                config = self.genai.GenerationConfig(**how)
                config.stop_token_ids = set(self.eos)
                ids = self.tensor(self.numpy.array([prompt], dtype=self.numpy.int64))
                running[place] = self.pipeline.add_request(self.requests, ids, config)
                self.requests += 1
            self.pipeline.step()
            for place, handle in list(running.items()):
                found: list[int] = []
                while handle.can_read():
                    for output in handle.read().values():
                        found += output.generated_ids
                if found:
                    answers[place].append(found)
                status = handle.get_status()
                if status == self.genai.GenerationStatus.FINISHED:
                    del running[place]
                elif status != self.genai.GenerationStatus.RUNNING:
                    raise RuntimeError(f"request {place} ended as {status}")
            if running and not self.pipeline.has_non_finished_requests():
                raise RuntimeError(f"requests {[*running]} ended without a status")
        return answers


class LlamaCpp:
    """llama-cpp-python; "context" is the longest text."""

    def __init__(self, settings: dict[str, Any]):
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        threads = len(settings["cores"])
        own: dict[str, Any] = {"n_threads": threads, "n_threads_batch": threads}
        own |= {"n_ctx": settings["context"], "verbose": False}
        if knobs := settings["knobs"]:  # without ``logits_all``, it has too few rows for logits
            own |= {"draft_model": LlamaPromptLookupDecoding(**knobs), "logits_all": True}
        self.llama, self.eos = Llama(settings["target"], **own), settings["eos"]
        self.version = f"llama-cpp-python {metadata.version('llama-cpp-python')}, F16"
        self.steps: Steps = []
        decode = self.llama.eval

        def counted(tokens: Any) -> None:
            self.steps.append([])
            decode(tokens)

        self.llama.eval = counted

    def generate(self, requests: Requests, concurrency: int, temperature: float) -> Iterator[Steps]:
        """The steps of each answer, one answer after the other, whatever the concurrency."""
        how = {"temp": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        for prompt, seed, limit in requests:
            self.steps = []
            self.llama.reset()  # no prefix is kept
            self.llama.set_seed(seed)
            for count, token in enumerate(self.llama.generate(prompt, **how), start=1):
                self.steps[-1].append(token)
                if token in self.eos or count == limit:
                    break
            yield self.steps


ENGINES = {"transformers": Transformers, "openvino": OpenVino, "llama.cpp": LlamaCpp}


def main() -> None:
    """Answer lines until stdin is closed."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what engines print goes to stderr
    try:
        settings = json.loads(sys.stdin.readline())
        os.sched_setaffinity(0, settings["cores"])
        engine: Any = ENGINES[settings["engine"]](settings)
        print(json.dumps({"version": engine.version}), file=replies)
        for line in sys.stdin:
            how = json.loads(line)
            parts = (how.pop(name) for name in ("prompts", "seeds", "limits"))
            requests = list(zip(*parts, strict=True))
            start = time.perf_counter()
            answers = list(engine.generate(requests, **how))
            found = {"seconds": time.perf_counter() - start, "answers": answers}
            print(json.dumps(found), file=replies)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=replies)
        sys.exit(1)


if __name__ == "__main__":
    main()
