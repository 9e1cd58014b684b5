"""Where this package's Triton kernels run; elsewhere their twins in torch do the same."""

from __future__ import annotations

import functools
from importlib.util import find_spec


@functools.cache
def uses_kernel(device_type: str) -> bool:
    """Whether tensors on such a device go to Triton: on a GPU, and on a CPU if it interprets.

    Raises:
        ImportError: They must, and Triton isn't installed.

    """
    installed = find_spec("triton") is not None
    if device_type == "cpu":
        return installed and interpreted()
    if not installed:
        raise ImportError(
            f"Medusa on {device_type} runs on Triton, which isn't installed. Install it with "
            "`pip install triton`."
        )
    return True


def interpreted() -> bool:
    """Whether Triton runs kernels as Python; TRITON_INTERPRET decides when it is imported."""
    import triton
    import triton.language as tl

    return not isinstance(tl.zeros, triton.JITFunction)
