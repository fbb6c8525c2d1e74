"""Makes the start of each root on this rank, from its model and what arguments of the doctor say of models."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.harness.judging import numerics
from shardproof.harness.tensors.fingerprints import bits_of_all, bits_on_host, host_rows
from shardproof.harness.tensors.trees import local_of
from shardproof.harness.training.evidence import Start
from shardproof.harness.watching.constants import constants_of
from shardproof.harness.watching.crossings import Crossings
from shardproof.harness.watching.following import Followers
from shardproof.harness.watching.groups import groups_of, reducers_of, sizes_of_flat, wrappers_of
from shardproof.harness.watching.model import Model
from shardproof.harness.watching.names import kind_of, name_of, unwrapped
from shardproof.harness.watching.records import Follower
from shardproof.harness.watching.roots import RootName
from shardproof.harness.watching.sharding import varied_in
from shardproof.harness.watching.ties import Built, Ties


class Starts:
    """The starts of roots, by what user code says of its models.

    Args:
        mesh: names the groups of ranks; None where the meshes of DTensors do.
        groups: further process groups by name.
        data: the names of mesh dimensions over which ranks have different data.
        ties: names of parameters that are one parameter.
        registered: registrations of parameters that were noted while the models were built.
        copies: whether copies of the roots are looked for, of which samples are held.
    """

    def __init__(
        self,
        *,
        mesh: DeviceMesh | None,
        groups: Mapping[str, dist.ProcessGroup] | None,
        data: Sequence[str],
        ties: Sequence[Sequence[str]],
        registered: Ties | None,
        copies: bool = True,
    ) -> None:
        self._copies = copies
        self._mesh, self._groups, self._data = mesh, dict(groups or {}), tuple(data)
        self._ties, self._registered = [tuple(names) for names in ties], registered
        self._followers, self._crossings = Followers(), Crossings()

    def of(self, model: Model, roots: Sequence[nn.Module], *, call: str, has_more: bool) -> Start:
        """Return the start of a root, or of several that are watched as one.

        Args:
            model: the model of its watch.
            roots: its modules.
            call: how user code names it; empty where that is not known.
            has_more: whether optimizers have parameters of other models.
        """
        model.crossings = self._crossings.begin()
        if self._copies:
            model.followers = self._followers.begin(id(model), roots)
        wrappers = wrappers_of(roots)
        groups = groups_of(roots, wrappers, mesh=self._mesh, groups=self._groups, data=self._data)
        parameters = list(model.parameters())
        bits = host_rows(bits_of_all([local_of(parameter) for _, parameter in parameters]))
        found = {}
        for (name, parameter), own in zip(parameters, bits, strict=True):
            place = model.place(name, parameter)
            box, mesh = (None, ()) if place is None else (place.box, place.mesh)
            found[name] = (box, mesh, tuple(own))
        return Start(
            groups=groups, bits=found, replicated=wrappers.replicated,
            model=type(unwrapped(roots[0])).__name__,
            shapes={name: tuple(parameter.shape) for name, parameter in parameters},
            flat=sizes_of_flat(roots), reducers=reducers_of(roots, wrappers),
            constant=_constant(parameters), seed=torch.initial_seed(),
            buffers=bits_on_host(model.bits_of_buffers()),
            ties=tuple(model.tied()),
            built=dataclasses.replace(
                Built() if self._registered is None else self._registered.built(roots), constants=constants_of(roots)
            ),
            varied=varied_in(parameters), name=RootName(kind_of(unwrapped(roots[0])).__name__, call),
            has_more=has_more,
        )  # fmt: skip

    def ties(self, roots: Sequence[nn.Module]) -> list[tuple[str, ...]]:
        """Return the names of parameters that should be one: those of the argument, and those registered so."""
        return [*self._ties, *(self._registered.names(roots) if self._registered is not None else [])]

    def followers(self) -> list[Follower]:
        """Return what is seen of copies of all roots that no optimizer steps."""
        return self._followers.take()

    def close(self) -> None:
        """Note no more registrations, and look at no followers."""
        self._followers.close()
        self._crossings.close()
        if self._registered is not None:
            self._registered.close()


def _constant(parameters: Sequence[tuple[str, nn.Parameter]]) -> frozenset[str]:
    """Return the names of plain parameters all of whose elements are equal."""
    plain = [(name, one.detach()) for name, one in parameters if name_of(one.dtype) in numerics.EPS and one.numel()]
    plain = [(name, one) for name, one in plain if type(one) is torch.Tensor]
    ends = host_rows([torch.stack(torch.aminmax(one)).float() for _, one in plain])
    return frozenset(name for (name, _), (least, most) in zip(plain, ends, strict=True) if least == most)
