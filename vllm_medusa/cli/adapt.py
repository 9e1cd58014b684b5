"""`vllm-medusa adapt`: train, tune and measure heads for a target from prompts."""

from __future__ import annotations

from vllm_medusa.adapt.options import AdaptOptions
from vllm_medusa.cli.console import ConsoleProgress, invocation

TEXT = """\
Make heads for a target, from prompts that resemble its workload: the target generates texts for
the prompts (distill), heads are trained on them (train), their accuracy is measured on held-out
texts (calibrate), the best tree for them is built (tree), and vLLM with these heads is compared
with plain vLLM on prompts not used before (compare). The tree size that is fastest on this
machine is saved with the heads.
---
Each stage is also a separate command and is printed before it runs; results and logs are in the
work folder. If interrupted, the same command resumes; with other options, only the affected stages
run again. The output has the heads (config.json and
model.safetensors, as vLLM reads them), report.md with a plot of the training, and report.json."""


def run(options: AdaptOptions, progress: ConsoleProgress) -> int:
    """Train the heads and print their measurements; returns 0, or 1 if tokens differ in float32."""
    from vllm_medusa.adapt.pipeline import adapt

    document = adapt(options, progress, invocation())
    if document is None:
        progress.note(f"nothing to do; the heads are in {options.output}")
        return 0
    from vllm_medusa.adapt.report import conclusion
    from vllm_medusa.cli.compare import table
    from vllm_medusa.offline.comparison import passed

    progress.console.print(table(document["measured"]))
    progress.note(conclusion(document))
    output, work = options.output, options.work_folder
    progress.note(f"heads and report in {output}; {work} is no longer needed")
    return 0 if passed(document["measured"]) else 1
