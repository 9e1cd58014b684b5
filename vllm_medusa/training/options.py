"""What training is asked for; calibration runs the target on the same machine options."""

from __future__ import annotations

from typing import Literal

from vllm_medusa.options import Dtype, Options, option


class MachineOptions(Options):
    """Where and how transformers runs the target: `train`, `calibrate` and `tree` take these."""

    device: str = option("auto", "cpu, cuda, cuda:1; auto: a GPU if there is one", shown="auto")
    dtype: Dtype = option("auto", "the target computes in; auto: its own on GPUs, float32 on CPUs")
    quantization: Literal["4bit", "8bit"] | None = option(None, "of the target, by bitsandbytes")
