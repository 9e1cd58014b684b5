"""Random engines and requests, compared with plain vLLM: ``make fuzz MINUTES=N``."""
