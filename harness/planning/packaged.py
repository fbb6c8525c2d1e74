"""Tiny models of the package transformers for ``--model transformers:NAME``, with random weights: nothing is loaded."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from shardproof.harness.planning.presets import Shape

#: Pixels of an image's side and of a patch's, and classes of images.
_IMAGE, _PATCH, _CLASSES = 32, 8, 10


def _shape(like: str) -> Shape:
    return Shape(
        family="transformers", layers=2, dim=64, heads=4, key_heads=2, hidden=192, vocab=256, tied=False, length=128,
        like=like,
    )  # fmt: skip


KNOWN = {
    "transformers:llama": _shape("a tiny LlamaForCausalLM"),
    "transformers:gpt2": _shape("a tiny GPT2LMHeadModel, tied"),
    "transformers:mixtral": _shape("a tiny MixtralForCausalLM, 4 experts of which a token takes 2"),
    "transformers:vit": _shape(f"a tiny ViTForImageClassification, images of {_IMAGE} x {_IMAGE}"),
}
"""By the names that ``--model`` takes."""


def build(name: str, shape: Shape, length: int) -> nn.Module:
    """Make a model of a known name in a shape on the default device, in float32 and without dropout.

    An ImportError passes, whether the package is missing or broken.
    """
    package: Any = importlib.import_module("transformers")
    common = {"num_hidden_layers": shape.layers, "hidden_size": shape.dim, "num_attention_heads": shape.heads}
    llama = {
        "num_key_value_heads": shape.key_heads, "intermediate_size": shape.hidden, "vocab_size": shape.vocab,
        "max_position_embeddings": length, "use_cache": False, "attention_dropout": 0.0,
    }  # fmt: skip
    gpt2 = {
        "n_layer": shape.layers, "n_embd": shape.dim, "n_head": shape.heads, "n_inner": shape.hidden,
        "vocab_size": shape.vocab, "n_positions": length, "use_cache": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    # Without a grouped kernel, which takes no float64.
    mixtral = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    vit = {
        "intermediate_size": shape.hidden, "image_size": _IMAGE, "patch_size": _PATCH, "num_labels": _CLASSES,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    makers: dict[str, Callable[[], Any]] = {
        "llama": lambda: package.LlamaForCausalLM(package.LlamaConfig(**common, **llama)),
        "gpt2": lambda: package.GPT2LMHeadModel(package.GPT2Config(**gpt2)),
        "mixtral": lambda: package.MixtralForCausalLM(package.MixtralConfig(**common, **llama, **mixtral)),
        "vit": lambda: package.ViTForImageClassification(package.ViTConfig(**common, **vit)),
    }
    model: nn.Module = makers[name.partition(":")[2]]()
    return model.train()


def image_inputs(batch: int, sequence: int) -> tuple[torch.Tensor]:
    """Images (batch, 3, side, side), float32, all 0; the number of tokens follows from their patches."""
    return (torch.zeros(batch, 3, _IMAGE, _IMAGE),)


def image_loss(output: Any, images: torch.Tensor) -> torch.Tensor:
    """The cross-entropy in float32 of another class for each image."""
    classes = torch.arange(len(images), device=images.device) % _CLASSES
    return functional.cross_entropy(output.logits.float(), classes)
