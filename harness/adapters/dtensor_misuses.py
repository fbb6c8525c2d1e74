"""Ways to call ``fully_shard``, and to use what it made, that its documentation excludes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


@dataclasses.dataclass(frozen=True)
class Scene:
    """Two linear layers, and what shards them.

    Attributes:
        fully_shard: the function.
        mesh: all ranks.
        mesh_dims: the class of its ``dp_mesh_dims``, None without one.
    """

    fully_shard: Callable[..., Any]
    mesh: DeviceMesh
    mesh_dims: Callable[..., Any] | None = None

    def layers(self) -> Any:
        """Two linear layers, on the device."""
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(self.mesh.device_type)

    def sharded(self, **options: Any) -> Any:
        """Make each layer a unit, and both the root."""
        layers = self.layers()
        for module in (*layers, layers):
            self.fully_shard(module, **({"mesh": self.mesh} | options))
        return layers

    def without_names(self, *shape: int) -> DeviceMesh:
        """All ranks on a mesh of a shape whose dimensions have no names."""
        return DeviceMesh(self.mesh.device_type, self.mesh.mesh.view(*shape))


def _twice(scene: Scene) -> None:
    scene.fully_shard(scene.sharded()[0], mesh=scene.mesh)


def _twice_in_a_list(scene: Scene) -> None:
    model = scene.layers()
    scene.fully_shard(model[1], mesh=scene.mesh)
    scene.fully_shard([model[0], model[1]], mesh=scene.mesh)


def _of_another_root(scene: Scene) -> None:
    first, batch = scene.sharded(), torch.ones(2, 4, device=scene.mesh.device_type)
    first(batch)
    other = nn.Sequential(first[0], *scene.layers())
    scene.fully_shard(other, mesh=scene.mesh)
    other(batch)


def _dimensions_without_names(scene: Scene) -> None:
    assert scene.mesh_dims is not None
    scene.fully_shard(scene.layers(), mesh=scene.without_names(-1, 1), dp_mesh_dims=scene.mesh_dims(shard="dp"))


def _cut_beside_no_names(scene: Scene) -> None:
    ranks = scene.mesh.size()
    both = DeviceMesh(scene.mesh.device_type, scene.mesh.mesh.view(ranks, 1), mesh_dim_names=("dp", "tp"))
    layers = parallelize_module(scene.layers(), both["tp"], {"0": ColwiseParallel()})
    scene.fully_shard(layers, mesh=scene.without_names(ranks))


def _stream_beside_replicas(scene: Scene) -> None:
    mesh = DeviceMesh(scene.mesh.device_type, scene.mesh.mesh.view(-1, 1), mesh_dim_names=("replicate", "shard"))
    layers = scene.sharded(mesh=mesh)
    calls: list[torch.Tensor] = []
    try:
        layers[0].set_all_reduce_hook(calls.append, stream=object())
    except ValueError:
        layers(torch.ones(2, 4, device=scene.mesh.device_type)).sum().backward()
        assert not calls, "the function that was refused runs all the same"
        raise


def _plain_parameter(scene: Scene) -> None:
    model = scene.sharded()
    model[0].weight = nn.Parameter(torch.ones(4, 4, device=scene.mesh.device_type))
    model(torch.ones(2, 4, device=scene.mesh.device_type))


#: By name.
MISUSES: dict[str, Callable[[Scene], Any]] = {
    "a-unit-twice": _twice,
    "a-unit-in-a-list": _twice_in_a_list,
    "a-unit-of-another-root": _of_another_root,
    "dimensions-of-a-mesh-without-names": _dimensions_without_names,
    "replicas-without-names": lambda scene: scene.sharded(mesh=scene.without_names(1, -1)),
    "cut-layers-beside-a-mesh-without-names": _cut_beside_no_names,
    "another-placement": lambda scene: scene.sharded(shard_placement_fn=lambda parameter: Replicate()),
    "a-stream-beside-replicas": _stream_beside_replicas,
    "a-plain-parameter": _plain_parameter,
}
