"""The code that depends on vLLM's internals: hooks, checks and the runner adapters.

Elsewhere only `plugin`, `offline` and `cli.serve` import vLLM, through its public interface.
"""
