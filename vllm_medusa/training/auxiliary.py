"""The target's hidden states as EAGLE-3 reads them: some layers' inputs, then the last state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.training.target import Target, TargetError


class AuxiliaryStates:
    """A target whose states are (A + 1) H wide: of A layers their inputs, and what its head sees.

    Layers are counted as vLLM does: 0's input are the embeddings, the number of layers names the
    last one's output, before the final norm. Stands where a `Target` does for `HiddenStates`.
    """

    def __init__(self, target: Target, layers: Sequence[int]) -> None:
        """Find the target's decoder layers.

        Raises:
            TargetError: it has no list of as many as its config says.

        """
        self.target, self.layers = target, tuple(sorted(layers))
        self.hidden_size = (len(self.layers) + 1) * target.hidden_size
        found = getattr(target.backbone, "layers", None)
        if found is None:
            found = getattr(target.backbone, "h", None)
        count = getattr(target.model.config.get_text_config(), "num_hidden_layers", None)
        if found is None or len(found) != count:
            raise TargetError(
                f"{type(target.model).__name__} has no plain list of decoder layers, whose inputs "
                "EAGLE-3 reads. Train Medusa or Hydra heads for it."
            )
        self._modules: Any = found

    @property
    def device(self) -> torch.device:
        """Where token ids have to be."""
        return self.target.device

    def hidden_states(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Of ids int64 [B, L], padded on the right: [B, L, (A + 1) H], see `Target`."""
        inputs: dict[int, Tensor] = {}

        def before(index: int) -> Any:
            def hook(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
                inputs[index] = args[0] if args else given["hidden_states"]

            return hook

        def after(_: Any, __: Any, output: Any) -> None:
            inputs[len(self._modules)] = output[0] if isinstance(output, tuple) else output

        hooks = [
            module.register_forward_pre_hook(before(index), with_kwargs=True)
            for index, module in enumerate(self._modules)
            if index in self.layers
        ]
        hooks.append(self._modules[-1].register_forward_hook(after))
        try:
            last = self.target.hidden_states(ids, attention_mask)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([*(inputs[layer].to(last.dtype) for layer in self.layers), last], -1)
