import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import vllm_medusa
from vllm_medusa import cli
from vllm_medusa.cli import serve

REPOSITORY = Path(__file__).parents[3]


def test_the_version_is_the_packages():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert vllm_medusa.__version__ == project["version"]


def test_version_and_help_load_neither_torch_nor_vllm():
    code = (
        "import sys\nfrom vllm_medusa import cli\n"
        "try:\n    cli.main(sys.argv[1:])\n"
        "finally:\n    assert not {'torch', 'vllm'} & sys.modules.keys()\n"
    )
    for arguments in (["--version"], ["--help"], ["generate", "--help"], ["compare", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
        )
        assert "medusa" in done.stdout.lower()


def test_every_public_name_can_be_had():
    for name in vllm_medusa.__all__:
        assert getattr(vllm_medusa, name) is not None
    assert set(vllm_medusa.__all__) <= set(dir(vllm_medusa))
    with pytest.raises(AttributeError, match="'nothing'"):
        vllm_medusa.nothing  # noqa: B018


def test_serve_passes_everything_on_untouched(monkeypatch):
    passed = []
    monkeypatch.setattr(serve, "run", lambda arguments: passed.append(arguments) or 0)
    with pytest.raises(SystemExit) as exit:
        cli.main(["serve", "target", "--help=all", "--speculative-model", "heads", "-tp", "2"])
    assert exit.value.code == 0
    assert passed == [["target", "--help=all", "--speculative-model", "heads", "-tp", "2"]]


def test_an_unknown_command_names_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        cli.main(["generat"])
    error = capsys.readouterr().err
    assert "generate" in error
    assert "serve" in error
