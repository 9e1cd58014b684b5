"""`vllm-medusa compare` and `adapt`: measure heads against plain vLLM; train and measure them."""

from __future__ import annotations

from vllm_medusa.adapt.options import AdaptOptions
from vllm_medusa.cli.console import ConsoleProgress, invocation, stdout_console
from vllm_medusa.offline.options import CompareOptions

COMPARE = """\
Compare vLLM with a drafter to plain vLLM: both run the same prompts, alternating, once for each
number of draft nodes and once with an automatic number. The results show whether all tokens are
equal, the tokens per verification step (tau) and the throughput ratio. The exit status is 1 if a
token differs in float32.
---
Records of `distill` are prompts too: the tokens before the first generated span. Because the
engines alternate, a ratio is meaningful even on a busy machine; tokens per second are not."""

ADAPT = """\
Train heads for a target on prompts that resemble its workload: the target generates texts for the
prompts (distill), heads are trained on them (train), their accuracy is measured on held-out texts
(calibrate), the best tree for them is built (tree), and vLLM with these heads is compared with
plain vLLM on prompts not used before (compare). The fastest tree size is saved with the heads.
---
Each stage is also a separate command; results and logs are in the work folder. If interrupted, run
the same command again to resume; with other options, only the affected stages run again. The output
contains the heads (as vLLM reads them), report.md with a plot of the training, and report.json."""


def run(options: CompareOptions, progress: ConsoleProgress) -> int:
    """Compare, and print the figures; returns 1 if a token differs in float32."""
    from vllm_medusa.offline.comparison import compare, conclusion, markdown, passed, setting

    document = compare(options, progress, invocation())
    console = stdout_console()
    console.print(setting(document), soft_wrap=True)
    print("\n".join(markdown(document)))
    console.print("\n".join(conclusion(document)), soft_wrap=True)
    if options.output is not None:
        console.print(f"figures in {options.output}", soft_wrap=True)
    return 0 if passed(document) else 1


def run_adapt(options: AdaptOptions, progress: ConsoleProgress) -> int:
    """Train the heads and print their measurements; returns 0, or 1 if tokens differ in float32."""
    from vllm_medusa.adapt.pipeline import MEASURE, adapt

    document = adapt(options, progress, invocation())
    if options.dry_run:
        return 0
    if document is None:
        progress.note(f"nothing to do; the heads are in {options.output}")
        return 0
    from vllm_medusa.adapt.report import conclusion
    from vllm_medusa.offline.comparison import markdown, passed

    print("\n".join(markdown(document["measured"])))
    progress.note("\n".join(conclusion(document)))
    output, work = options.output, options.work_folder
    progress.note(
        f"heads and report in {output}; {work} is no longer needed (its {MEASURE} has prompts that "
        "were not trained on)"
    )
    return 0 if passed(document["measured"]) else 1
