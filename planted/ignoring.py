"""Makes the adapters that declare a capability and ignore it, for capabilities that are options, settings or calls.

``planted.adapters:without_<capability>``, with underscores, is the first of the references that declares it, and hears
nothing of the capability in what a case asks for. A capability of which no option speaks, such as outputs that the loss
ignores, is ignored by an edit or by a class: a row says so by ``ignores``.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from shardproof.harness.adapters.base import Adapter, Clip, Config, Precision, Settings
from shardproof.harness.adapters.capability import Capability


def _last_dimension(config: Config) -> DeviceMesh:
    """The last dimension of the mesh: the ranks that share parameters, without the replicas."""
    return DeviceMesh.from_group(config.mesh.get_group(config.mesh.ndim - 1), config.mesh.device_type)


def _without_size(config: Config) -> bool | None:
    """Freeing whatever a case wants to reshard to a smaller size."""
    asked = config.reshard_after_forward
    return asked if asked is None or isinstance(asked, bool) else True


def _without_limit(config: Config) -> Clip | None:
    """No norm is too large."""
    return config.clip and dataclasses.replace(config.clip, max_norm=math.inf)


#: By capability, the fields of the configuration as an adapter hears them that ignores it: "a.b" is a field of a field,
#: and a function makes the value from the configuration that the case asks for. The precision is that of each unit.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "buffer-dtype": {"precision.buffer_dtype": None},
    "cast-after-init": {"cast": None},
    "clip-any-norm": {"clip.norm_type": 2.0},
    "clip-by-call": {"clip": _without_limit},
    "clip-raises": {"clip.error_if_nonfinite": False},
    "clipping": {"clip": _without_limit},
    "deferred-all-reduce": {"accumulation": None},
    "deferred-per-unit": {"accumulation.units": "all"},
    "deferred-reduction": {"accumulation": None},
    "flat-parameters": {"flat_parameters": False},
    "full-precision-in-eval": {"precision.full_precision_in_eval": False},
    "backward-prefetch": {"backward_prefetch": None, "forward_prefetch": None, "limit_all_gathers": None},
    "hybrid": {"mesh": _last_dimension},
    "ignored-modules": {"ignored_params": (), "ignored_modules": ()},
    "ignored-params": {"ignored_params": ()},
    "reshard-after-backward": {"accumulation.reshard_after_backward": True},
    "is-last-backward": {"accumulation.set_is_last_backward": False},
    "meta-load": {"materialize": True},
    "model-precision": {"precision": Precision()},
    "dp-mesh-dims": {"dp_mesh_dims": None},
    "param-dtype": {"precision.param_dtype": None},
    "parameter-meshes": {"parameter_meshes": {}},
    "reduce-dtype": {"precision.reduce_dtype": None},
    "no-shard": {"shards": True},
    "replicated-modules": {"replicated": ()},
    "reshard-after-forward": {"reshard_after_forward": None},
    "reshard-to-size": {"reshard_after_forward": _without_size},
    "root-reshard": {"reshard_after_forward": None},
    "shard-dimension": {"shard_dim": None},
    "sync-module-states": {"sync_module_states": False},
    "unit-meshes": {"unit_meshes": {}},
    "auto-wrap-policy": {"auto_wrap_policy": None},
}

#: By capability, the fields of the settings of single units that such an adapter does not hear.
SETTINGS: Mapping[str, Sequence[str]] = {
    "separate-reduce-scatter-group": ("separate_reduce_scatter_group",),
    "unit-settings": tuple(one.name for one in dataclasses.fields(Settings)),
}

#: By capability, the methods of such an adapter that do nothing.
CALLS: Mapping[str, Sequence[str]] = {
    "async-unshard": ("unshard",),
    "manual-reshard": ("reshard",),
    "recovery": ("recover",),
    "reduction-hook": ("register_comm_hook",),
}


def made(base: type[Adapter], capability: Capability) -> dict[str, Any]:
    """The methods of the class that drives ``base`` and ignores a capability.

    Raises:
        AttributeError: the capability is no option, setting or call.
    """
    options, fields = OPTIONS.get(capability), SETTINGS.get(capability)
    methods: dict[str, Any] = dict.fromkeys(CALLS.get(capability, ()), _nothing)
    if options is not None:

        def __init__(self: Any, model: Any, *, optimizer: Any, config: Config) -> None:
            base.__init__(self, model, optimizer=optimizer, config=_heard(config, options))

        methods["__init__"] = __init__
    if fields is not None:

        def change(self: Any, settings: Settings, **where: Any) -> None:
            base.change(self, dataclasses.replace(settings, **dict.fromkeys(fields)), **where)

        methods["change"] = change
    if not methods:
        raise AttributeError(f"{capability} is no option of a configuration, no setting and no call: planted.ignoring")
    return methods


def _nothing(self: Adapter, *args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def _heard(config: Config, options: Mapping[str, Any]) -> Config:
    """The configuration with other values of some fields."""
    for name, value in options.items():
        field, _, inner = name.partition(".")
        values: dict[str, Any] = {field: value(config) if callable(value) else value}
        if inner:
            outer = getattr(config, field)
            values = {field: outer and dataclasses.replace(outer, **{inner: value})}
        if field == "precision" and inner:
            own = {unit: dataclasses.replace(one, **{inner: value}) for unit, one in config.unit_precision.items()}
            values["unit_precision"] = own
        config = dataclasses.replace(config, **values)
    return config
