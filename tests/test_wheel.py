"""The wheel contains the whole package, also if built from the sdist, and runs without a clone.

`make wheel` installs it with its dependencies too, and runs every command.
"""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

CLONE = Path(__file__).parents[1]


def build(sources, folder):
    """Build a wheel of a folder or an sdist; returns its path."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", folder, sources], check=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder like the clone; setuptools writes next to its sources."""
    folder = tmp_path_factory.mktemp("sources")
    names = ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE")
    for name in (*names, "vllm_medusa", "tests"):
        (folder / name).symlink_to(CLONE / name)
    return folder


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory):
    """The wheel built from the clone."""
    return build(sources, tmp_path_factory.mktemp("wheel"))


def test_it_contains_exactly_the_files_of_the_package(wheel):
    package = CLONE / "vllm_medusa"
    files = {p.relative_to(CLONE).as_posix() for p in package.rglob("*") if p.is_file()}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == {name for name in files if "__pycache__" not in name}


def test_the_sdist_builds_the_same_wheel(wheel, sources, tmp_path):
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=sources, check=True, capture_output=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert "CHANGELOG.md" in held
    assert not [name for name in held if name.startswith("tests")]
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(build(sdist, tmp_path)) as other:
        contents = [
            {name: file.read(name) for name in file.namelist() if not name.endswith("RECORD")}
            for file in (one, other)
        ]
    assert contents[0] == contents[1]


def test_it_runs_in_a_fresh_environment(wheel, tmp_path):
    """Installed by pip, without the clone; its dependencies are those of this environment."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"]
    subprocess.run([*install, "--no-index", wheel], check=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))

    def run(*words):
        done = subprocess.run(
            [tmp_path / "env" / "bin" / words[0], *words[1:]],
            cwd=tmp_path,
            env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
            capture_output=True,
            text=True,
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
    file, plugins, presets = run("python", "-c", code).splitlines()
    assert Path(file).is_relative_to(tmp_path)
    assert "vllm_medusa.plugin:register" in plugins
    assert presets.split()[1] == "63"
    said = " ".join(run("vllm-medusa", "--help").split())
    assert "Write heads, or an EAGLE-3 drafter, in another format" in said
