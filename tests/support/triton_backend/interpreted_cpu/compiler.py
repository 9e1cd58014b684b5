from __future__ import annotations

from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget


class InterpretedBackend(BaseBackend):
    """Provides a name for caches of compiled code, but no compiler."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: dict[str, Any]) -> Any:
        raise NotImplementedError("kernels are interpreted here: set TRITON_INTERPRET=1")

    add_stages = load_dialects = get_module_map = parse_options
