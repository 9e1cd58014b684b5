"""The demo: a chat model in plain vLLM and with tree drafts, side by side."""
