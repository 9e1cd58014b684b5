"""`python -m vllm_medusa.cli`: the same as the `vllm-medusa` command."""

from vllm_medusa.cli import main

if __name__ == "__main__":
    main()
