"""Parameters sharded over fewer ranks between forward and backward (``reshard_after_forward`` as an int).

They cost more memory than full sharding and a cheaper gather in backward, over ranks that are close to each other.
They are laid out anew for the smaller number of ranks, so that the DTensors that the modules hold meanwhile are cut
where a DTensor on that mesh is expected to be cut, also when the rows do not divide.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import Shard

from fsdp_impl.common import dtensor, streams
from fsdp_impl.common.layout import build_layout, shard_rows, shard_view
from fsdp_impl.common.mesh import ShardMesh
from fsdp_impl.per_parameter.param import ShardedParam


class SmallerShards:
    """Shards of unsharded ``params`` over ``mesh``, registered with the modules.

    Attributes:
        buffer: this rank's shards, the input of the gather in backward.
        layout: their layout.
        mesh: the mesh that they are sharded over.
        written: event after which ``buffer`` may be read on other streams.
    """

    @torch.no_grad()
    def __init__(self, params: Sequence[ShardedParam], mesh: ShardMesh, device: torch.device) -> None:
        self.mesh = mesh
        self.layout = build_layout(
            [p.size for p in params], [p.compute_dtype for p in params], mesh.size, mesh.rank, [p.dim for p in params]
        )
        self.buffer = torch.zeros(self.layout.numel, dtype=self.layout.dtype, device=device)
        views = [shard_view(self.buffer, slot) for slot in self.layout.slots]
        torch._foreach_copy_(views, [_part_of(param, mesh) for param in params])
        self.written = streams.record(streams.current(device))
        for param, view in zip(params, views, strict=True):
            spec = dtensor.spec_for(mesh.mesh, mesh.placements(Shard(param.dim)), param.size, view.dtype)
            param.register(nn.Parameter(dtensor.wrap(view, spec), requires_grad=param.sharded.requires_grad))


def _part_of(param: ShardedParam, mesh: ShardMesh) -> torch.Tensor:
    assert param.unsharded is not None
    start, rows = shard_rows(param.size[param.dim], mesh.size, mesh.rank)
    return param.unsharded.detach().narrow(param.dim, start, rows)
