"""Lightning Fabric's FSDP1 precision "32-true" makes a model, its inputs and its outputs float32, whatever they were

lightning-fabric 2.6.6. `32-true` is the default. A model with bfloat16 or float64 parameters is converted as a whole when it is set
up, and what a forward under the user's own autocast returns becomes float32 on the way out. Silent. Seen by PRECISION-9,
FROZEN-1, INIT-5, EVALUATION-4 and DRAWN-1 on two GPUs; `FSDPStrategy` has this plugin on any device.
"""

# /// finding
# implementations = ["lightning.fabric_fsdp1"]
# requirements = ["PRECISION-9", "FROZEN-1", "INIT-5", "EVALUATION-4", "DRAWN-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27"]
# packages = ["lightning-fabric>=2.6.6"]
# shows = '^torch.float32 torch.float32 torch.float32$'
# ///

import torch
from torch import nn


def main():
    from lightning_fabric.plugins.precision import FSDPPrecision

    precision = FSDPPrecision("32-true")
    low = torch.ones(2, dtype=torch.bfloat16)
    model = precision.convert_module(nn.Linear(2, 2, dtype=torch.float64))
    print(model.weight.dtype, precision.convert_input(low).dtype, precision.convert_output(low).dtype)


if __name__ == "__main__":
    main()
