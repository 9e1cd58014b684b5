"""Generate for a file of prompts, resumably; the same as `vllm-medusa generate`.

    python examples/offline_batch.py TARGET --speculative-model HEADS \
        --prompts prompts.jsonl --output results.jsonl --temperature 0.7 --seed 1

`--help` lists the options, the forms of prompts and the keys of the results. Stop it whenever you
like, by Ctrl-C or `kill -9`: the same command goes on where it stopped.

The pieces for a job of your own are in `vllm_medusa.offline`: `read_prompts` reads text, JSON-lines
and Parquet files, `run_batch` keeps an engine busy and yields each result when it is finished, and
`ResultLog` is the file of results that survives being killed.
"""

import sys

from vllm_medusa.cli import main

if __name__ == "__main__":
    main(["generate", *sys.argv[1:]])
