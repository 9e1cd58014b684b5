"""The wheel contains the whole package: it runs without a clone.

`make wheel` does the same with all extras in a fresh environment, and runs every command.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CLONE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"  # setuptools writes next to its sources
    sources.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "vllm_medusa"):
        (sources / name).symlink_to(CLONE / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", folder, sources], check=True)
    (path,) = folder.glob("*.whl")
    return path


def test_it_contains_exactly_the_files_of_the_package(wheel):
    package = CLONE / "vllm_medusa"
    files = {p.relative_to(CLONE).as_posix() for p in package.rglob("*") if p.is_file()}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == {name for name in files if "__pycache__" not in name}


def test_it_runs_without_the_clone(wheel, tmp_path):
    """Commands, presets and the plugin come from the wheel, in a separate folder."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")

    def run(*words):
        environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    code = """
import vllm_medusa, importlib.metadata as metadata
from vllm_medusa.cli import build_parser
print(vllm_medusa.__file__)
print(*(entry.value for entry in metadata.entry_points(group="vllm.general_plugins")))
print(len(vllm_medusa.preset_names()), vllm_medusa.load_preset("mc_sim_7b_63").num_draft_tokens)
"""
    file, plugins, presets = run("-c", code).splitlines()
    assert Path(file).is_relative_to(tmp_path)
    assert "vllm_medusa.plugin:register" in plugins
    assert presets.split()[1] == "63"
    said = " ".join(run("-m", "vllm_medusa.cli", "--help").split())
    assert "convert heads, or an EAGLE-3 drafter" in said
