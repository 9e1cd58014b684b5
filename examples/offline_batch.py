"""Generate for a file of prompts, resumably, as `vllm-medusa generate` does.

    python examples/offline_batch.py TARGET --speculative-model HEADS \
        --prompts prompts.jsonl --output results.jsonl --temperature 0.7 --seed 1

`--help` lists the options, the prompt formats and the result fields. It can be interrupted at any
time, by Ctrl-C or `kill -9`; the same command resumes.

To write your own job, use `vllm_medusa.offline`: `read_prompts` reads text, JSON-lines and Parquet
files, `run_batch` keeps the engine's batch full and yields each result when it is finished, and
`ResultLog` is a results file that stays valid if the process is killed.
"""

import sys

from vllm_medusa.cli import main

if __name__ == "__main__":
    main(["generate", *sys.argv[1:]])
