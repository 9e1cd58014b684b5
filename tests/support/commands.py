"""Run commands in this process as a user would type them."""

import pytest

from vllm_medusa import cli


def run(*words: object) -> int:
    """Run `vllm-medusa` with these arguments; returns its exit status."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    return int(ended.value.code or 0)


def said(captured: pytest.CaptureFixture[str]) -> str:
    """Standard error since the last call, on one line."""
    return " ".join(captured.readouterr().err.split())
