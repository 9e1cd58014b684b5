"""vLLM's schedulers with draft trees, and what they ask: clocks, cost keys, grammars."""
