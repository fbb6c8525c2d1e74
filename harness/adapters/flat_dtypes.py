"""Scripts that ask a ``FullyShardedDataParallel`` of which dtypes something is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardproof.harness.adapters.flat_misuses import Scene


def _buffers_that_are_saved(scene: Scene) -> list[str]:
    """The dtypes of buffers, the wrapped module's own and one deep in it, that are saved while they are cast."""
    layers = scene.layers()
    for module in (layers, layers[1]):
        module.register_buffer("scale", torch.ones(4, dtype=torch.float64, device=scene.device))
    precision = scene.api.MixedPrecision(buffer_dtype=torch.bfloat16)
    model = scene.wrap(nn.Sequential(layers), mixed_precision=precision)
    scene.run(model)  # which casts them
    held = {str(buffer.dtype) for buffer in model.buffers()}
    saved = model.state_dict()
    return [*sorted(held), *(str(saved[name].dtype) for name in ("0.scale", "0.1.scale"))]


def _norm_of_low_gradients(scene: Scene) -> str:
    """That of the norm where gradients stay in lower precision."""
    precision = scene.api.MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    model = scene.wrap(scene.layers(), mixed_precision=precision)
    scene.run(model).sum().backward()
    return str(model.clip_grad_norm_(1.0).dtype)


def _gradients_of_a_cast_model(scene: Scene) -> list[str]:
    """Those of the gradients that this rank has, once the model has been cast after backward."""
    model = scene.nested()
    scene.run(model).sum().backward()
    model.double()
    return sorted({str(one.grad.dtype) for one in model.parameters() if one.grad is not None})


#: By what is asked; the answers are in the suites.
DTYPES: dict[str, Callable[[Scene], Any]] = {
    "buffers-that-are-saved": _buffers_that_are_saved,
    "norm-of-low-gradients": _norm_of_low_gradients,
    "gradients-of-a-cast-model": _gradients_of_a_cast_model,
}
