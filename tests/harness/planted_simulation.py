"""References that go wrong where no other case on a CPU looks: in worlds of more than eight ranks, or with streams."""

from __future__ import annotations

from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted_reductions import Edit, edited

_MANY = "mesh.size > 8"

PER_PARAMETER = {
    # Gathers.
    "gathered-twice-by-many": Edit(
        "per_parameter.group:ParamGroup._gather",
        "        return source, output, collectives.gather(",
        f"        if {_MANY}:\n"
        "            collectives.gather(output, source, mesh.group, unit=self.label)\n"
        "        return source, output, collectives.gather(",
    ),
    "gathered-out-of-turn": Edit(
        "per_parameter.unit:prefetch_previous",
        "iteration.forward_order[index - 1]",
        f"iteration.forward_order[index - (2 if index > 2 and group.{_MANY} else 1)]",
    ),
    # Reductions.
    "many-reduced-in-double": Edit(
        "per_parameter.reduction:Reducer._copy_in",
        "_common_dtype(self._group, params)",
        f"torch.float64 if self._group.{_MANY} else _common_dtype(self._group, params)",
    ),
    # Shares.
    "one-row-more": Edit("common.layout:chunk_rows", "-(-rows // world)", "-(-rows // world) + (world > 8)"),
    "floor-of-rows": Edit(
        "common.layout:chunk_rows", "-(-rows // world)", "max(rows // world, 1) if world > 8 else -(-rows // world)"
    ),
    "one-rank-misses-a-row": Edit(
        "common.layout:shard_rows",
        "min(chunk, rows - start)",
        "min(chunk, rows - start) - (start < rows and world > 8 and rank == world // 2)",
    ),
    # Groups.
    "shards-of-the-first-dimension": Edit(
        "per_parameter.mesh:ShardMesh.__post_init__",
        "self.mesh.get_group(last) if self.sharded",
        "self.mesh.get_group(last if self.mesh.size() <= 8 else 0) if self.sharded",
    ),
    "replicas-of-the-last-dimension": Edit(
        "per_parameter.mesh:ShardMesh.__post_init__",
        "self.mesh.get_group(0) if replicated",
        "self.mesh.get_group(0 if self.mesh.size() <= 8 else last) if replicated",
    ),
    "neighbours-far-apart": Edit(
        "per_parameter.mesh:_smaller_mesh",
        "mesh.mesh.mesh.view(-1, size)",
        "(mesh.mesh.mesh.view(-1, size) if mesh.size <= 8 else mesh.mesh.mesh.view(size, -1).T.contiguous())",
    ),
    # Memory.
    "many-kept-after-forward": Edit(
        "per_parameter.group:ParamGroup._free_unsharded",
        "if self._unsharded is not None:",
        f"if self._unsharded is not None and not (self.{_MANY} and self.phase is Phase.FORWARD):",
    ),
    "many-kept-after-backward": Edit(
        "per_parameter.group:ParamGroup._free_unsharded",
        "if self._unsharded is not None:",
        f"if self._unsharded is not None and not (self.{_MANY} and self.phase is not Phase.FORWARD):",
    ),
    "all-reduced-kept-until-the-end": Edit(
        "common.comm_context:CommContext.release_reduce_outputs",
        "while len(self._reduce_outputs) > keep:",
        "while self._reduce_outputs and not keep:",
    ),
}

ADAPTERS = edited(__name__, {ReferenceAdapter: PER_PARAMETER, ReferenceFlatAdapter: {}})
