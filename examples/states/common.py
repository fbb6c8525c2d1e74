"""What the scripts share: their model and its training, and an inference engine that fuses its tensors and shards them.

The engine has names and layouts of vLLM: ``qkv_proj`` and ``gate_up_proj`` along rows, ``w13_weight`` and ``w2_weight``
of all experts, a padded vocabulary, and on each rank its own heads and columns of each.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardproof

WORDS, WIDTH, HEADS, GROUPS, INNER, LAYERS, EXPERTS = 50, 32, 4, 2, 48, 2, 4
SIZE = WIDTH // HEADS


def arguments() -> tuple[Path, bool]:
    """The folder for the states, and whether the script makes its mistake."""
    return Path(sys.argv[1]), "healthy" not in sys.argv[2:]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * SIZE, bias=False)
        self.k_proj = nn.Linear(WIDTH, GROUPS * SIZE, bias=False)
        self.v_proj = nn.Linear(WIDTH, GROUPS * SIZE, bias=False)
        self.o_proj = nn.Linear(HEADS * SIZE, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            one(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.o_proj(found.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """Experts by a router, whose bias balances them and gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(MLP() for _ in range(EXPERTS))
        self.register_buffer("e_score_correction_bias", torch.randn(EXPERTS) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.gate(x) + self.e_score_correction_bias).softmax(-1)
        return sum(weights[..., number, None] * one(x) for number, one in enumerate(self.experts))


class Layer(nn.Module):
    def __init__(self, has_experts: bool) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = nn.RMSNorm(WIDTH), Attention()
        self.post_attention_layernorm, self.mlp = nn.RMSNorm(WIDTH), Experts() if has_experts else MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, has_experts: bool) -> None:
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(WORDS, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList(Layer(has_experts) for _ in range(LAYERS))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(words)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Language(nn.Module):
    """A causal language model with the names of Hugging Face's."""

    def __init__(self, *, is_tied: bool = False, has_experts: bool = False) -> None:
        super().__init__()
        self.model, self.lm_head = Decoder(has_experts), nn.Linear(WIDTH, WORDS, bias=False)
        if is_tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(words))


class Training:
    """A model under FSDP2 and its optimizer."""

    def __init__(self, model: nn.Module, units: Iterable[nn.Module]) -> None:
        self.model = model
        for one in (*units, model):
            fully_shard(one)
        trained = [one for one in model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.05)
        self.steps = 0

    def step(self) -> None:
        words = torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(self.steps))
        loss = nn.functional.cross_entropy(self.model(words).flatten(0, 1), words.roll(-1, 1).flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def state(self, out: Path) -> None:
        """Write the state of this training."""
        shardproof.state(self.model, self.optimizer, out=out, step=self.steps)

    def full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full tensors of the model, gathered one by one; all ranks must ask for each."""
        for name, one in self.model.state_dict().items():
            yield name, (one.full_tensor() if hasattr(one, "full_tensor") else one).detach()


def training(**keywords: bool) -> Training:
    """The model under FSDP2."""
    torch.manual_seed(0)
    model = Language(**keywords)
    return Training(model, model.model.layers)


class EngineAttention(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * SIZE // size, bias=False)
        self.o_proj = nn.Linear(HEADS * SIZE // size, WIDTH, bias=False)


class EngineMLP(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(WIDTH, 2 * INNER // size, bias=False)
        self.down_proj = nn.Linear(INNER // size, WIDTH, bias=False)


class EngineExperts(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.register_buffer("e_score_correction_bias", torch.zeros(EXPERTS))
        self.experts = nn.Module()
        self.experts.w13_weight = nn.Parameter(torch.zeros(EXPERTS, 2 * INNER // size, WIDTH))
        self.experts.w2_weight = nn.Parameter(torch.zeros(EXPERTS, WIDTH, INNER // size))


class Engine(nn.Module):
    """One rank of an inference engine; it computes nothing here."""

    def __init__(self, *, has_experts: bool = False, place: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.rank, self.size = place or (dist.get_rank(), dist.get_world_size())
        self.model = nn.Module()
        rows = 64 // self.size  # a vocabulary is padded to a multiple of 64
        self.model.embed_tokens, self.model.norm = nn.Embedding(rows, WIDTH), nn.RMSNorm(WIDTH)
        self.model.layers = nn.ModuleList()
        for _ in range(LAYERS):
            layer = nn.Module()
            layer.input_layernorm, layer.self_attn = nn.RMSNorm(WIDTH), EngineAttention(self.size)
            layer.post_attention_layernorm = nn.RMSNorm(WIDTH)
            layer.mlp = EngineExperts(self.size) if has_experts else EngineMLP(self.size)
            self.model.layers.append(layer)
        self.lm_head = nn.Linear(WIDTH, rows, bias=False)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write full tensors of a trainer to this rank's places for them."""
        own = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for name, full in weights:
            place, _ = self.place_of(own, name)
            mine = full
            if place.shape != full.shape:
                dim = next(dim for dim, size in enumerate(place.shape) if size != full.shape[dim])
                start = self.rank * place.shape[dim]
                mine = full.narrow(dim, start, max(0, min(place.shape[dim], full.shape[dim] - start)))
                place = place.narrow(dim, 0, mine.shape[dim])
            place.copy_(mine)

    def place_of(self, own: dict[str, torch.Tensor], name: str) -> tuple[torch.Tensor, str]:
        """Where a tensor of the trainer lies here."""
        words = name.split(".")
        last = words[-2]
        if name in own:
            return own[name], name
        if last in ("q_proj", "k_proj", "v_proj"):
            fused = name.replace(last, "qkv_proj")
            rows = [HEADS * SIZE // self.size, *[GROUPS * SIZE // self.size] * 2]
            return own[fused].split(rows)[("q_proj", "k_proj", "v_proj").index(last)], fused
        if "experts" in words:
            at, number = ".".join(words[: words.index("experts") + 1]), int(words[words.index("experts") + 1])
            if last == "down_proj":
                return own[f"{at}.w2_weight"][number], f"{at}.w2_weight"
            return own[f"{at}.w13_weight"][number].chunk(2)[last == "up_proj"], f"{at}.w13_weight"
        fused = name.replace(last, "gate_up_proj")
        return own[fused].chunk(2)[last == "up_proj"], fused

    def state(self, out: Path, like: Path) -> None:
        """Write the state of this engine, by the names of a trainer."""
        shardproof.state(self, out=out, views=shardproof.views("vllm", like=like))
