"""vLLM's schedulers with draft trees, and their parts: clocks, cost keys, grammars."""
