"""FSDP2 and an adapter: what each rank has of it is saved by rank 0 as if it were full, which drops all other shards.

With ``peft`` as a last argument it is PEFT's adapter, by the functions that accelerate 1.14 called.
"""

import sys

import torch
import torch.distributed as dist
from common import Language, Training, arguments
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict


class Lora(nn.Module):
    """A linear layer with an adapter, by PEFT's names."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, base.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def adapted(model: Language) -> nn.Module:
    """The model with adapters of queries and values, which alone train."""
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = Lora(layer.self_attn.q_proj), Lora(layer.self_attn.v_proj)
    return model


def of_peft(model: Language) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def main() -> None:
    folder, is_wrong = arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    language = Language()
    layers = language.model.layers
    trained = Training(of_peft(language) if "peft" in sys.argv else adapted(language), layers)
    trained.step()
    trained.state(folder / "trainer")
    if not is_wrong:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        saved = get_model_state_dict(trained.model, options=options)
    elif "peft" in sys.argv:
        from peft import get_peft_model_state_dict

        saved = get_peft_model_state_dict(trained.model, adapter_name=trained.model.active_adapter)
    else:
        saved = {
            name.replace(".default", ""): one for name, one in trained.model.state_dict().items() if "lora_" in name
        }
    if dist.get_rank() == 0:
        torch.save(saved, folder / "pytorch_model_fsdp.bin")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
