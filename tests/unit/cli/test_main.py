import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import vllm_medusa
from vllm_medusa import cli
from vllm_medusa.cli import serve

REPOSITORY = Path(__file__).parents[3]
COMMANDS = (
    *("generate", "adapt", "distill", "train", "calibrate", "tree"),
    *("convert", "inspect", "compare", "doctor"),
)


def test_the_version_is_the_packages():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert vllm_medusa.__version__ == project["version"]


def test_version_and_help_load_neither_torch_nor_vllm():
    code = (
        "import contextlib, sys\nfrom vllm_medusa import cli\n"
        "for line in sys.argv[1:]:\n"
        "    with contextlib.suppress(SystemExit):\n        cli.main(line.split())\n"
        "    assert not {'torch', 'vllm'} & sys.modules.keys(), line\n"
    )
    lines = ["--version", "--help", *(f"{name} --help" for name in COMMANDS)]
    done = subprocess.run(
        [sys.executable, "-c", code, *lines], capture_output=True, text=True, check=True
    )
    assert done.stdout.count("usage: ") == len(lines) - 1


def test_every_public_name_can_be_imported():
    for name in vllm_medusa.__all__:
        assert getattr(vllm_medusa, name) is not None
    with pytest.raises(AttributeError, match="'nothing'"):
        vllm_medusa.nothing  # noqa: B018


def test_serve_passes_all_arguments_unchanged(monkeypatch):
    passed = []
    monkeypatch.setattr(serve, "run", lambda arguments: passed.append(arguments) or 0)
    with pytest.raises(SystemExit) as exit:
        cli.main(["serve", "target", "--help=all", "--speculative-model", "heads", "-tp", "2"])
    assert exit.value.code == 0
    assert passed == [["target", "--help=all", "--speculative-model", "heads", "-tp", "2"]]


def test_options_are_not_abbreviated(capsys):
    """Options can't be abbreviated: a value could be assigned to a similar option."""
    with pytest.raises(SystemExit) as exit:
        cli.main(["compare", "target", "heads", "--prompts", "x", "--budget", "7"])
    assert exit.value.code == 2
    assert "--budget 7. Did you mean --budgets?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["compare", "target", "heads", "--prompts", "x", "--wholly-other"])
    error = capsys.readouterr().err
    assert "unrecognized arguments: --wholly-other.\nSee vllm-medusa compare --help.\n" in error
    assert "usage:" not in error
