"""Commands as a user types them, run in this process."""

import pytest

from vllm_medusa import cli


def run(*words: object) -> int:
    """Run `vllm-medusa` with these words; its exit status."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    return int(ended.value.code or 0)


def said(captured: pytest.CaptureFixture[str]) -> str:
    """What went to standard error since the last call, on one line."""
    return " ".join(captured.readouterr().err.split())
