"""Functions of torch that are observed are torch's own again when nobody observes them."""

from __future__ import annotations

import torch

from shardproof.harness.watching import norms


def test_whoever_leaves_first() -> None:
    """Two models that are watched at once may end in the order in which they began, or in the other."""
    before, calls = torch.nn.utils.clip_grad._get_total_norm, {"first": 0, "second": 0}

    def observed(name):
        def on_norm(*call):
            calls[name] += 1

        return norms.observed(on_norm, lambda: None, lambda: None)

    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    for order in (("first", "second"), ("second", "first")):
        contexts = {name: observed(name) for name in ("first", "second")}
        for name in ("first", "second"):
            contexts[name].__enter__()
        contexts[order[0]].__exit__(None, None, None)
        torch.nn.utils.get_total_norm([parameter.grad])
        contexts[order[1]].__exit__(None, None, None)
        torch.nn.utils.get_total_norm([parameter.grad])
    assert torch.nn.utils.clip_grad._get_total_norm is before, "the function is still replaced"
    assert calls == {"first": 1, "second": 1}, "the one that is left observes, and nobody afterwards"
