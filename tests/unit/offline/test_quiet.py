import os
import subprocess
import sys

import pytest

from vllm_medusa.offline.quiet import stderr_to_log


def test_noise_goes_to_the_log_and_comes_back_on_failure(capfd):
    with stderr_to_log():
        make_noise()
    assert capfd.readouterr().err == ""

    with pytest.raises(RuntimeError):
        fail_loudly()
    assert "noise from C\nchild\n" in capfd.readouterr().err


def make_noise() -> None:
    os.write(2, b"noise from C\n")
    subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write('child\\n')"])


def fail_loudly() -> None:
    with stderr_to_log():
        make_noise()
        raise RuntimeError


def test_errors_that_explain_themselves_bring_no_log(capfd):
    with pytest.raises(ValueError, match="the tree"):
        refuse()
    assert "noise" not in capfd.readouterr().err


def refuse() -> None:
    with stderr_to_log():
        os.write(2, b"noise\n")
        raise ValueError("the tree has an orphan")
