"""The only code, with `plugin`, that imports vLLM: hooks, checks and the runner adapters."""
