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
from shardproof.harness.adapters.capability import OPTIONS, Capability
from shardproof.harness.adapters.config import default_of


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
#: and a function makes the value from the configuration that the case asks for. The precision is that of each unit. Of
#: an option without a row here it hears the default.
HEARD: Mapping[str, Mapping[str, Any]] = {
    "accumulation.skips": {"accumulation": None},
    "backward-prefetch": {"backward_prefetch": None, "forward_prefetch": None, "limit_all_gathers": None},
    "cast-after-init": {"cast": None},
    "clip-by-call": {"clip": _without_limit},
    "clipping": {"clip": _without_limit},
    "deferred-reduction": {"accumulation": None},
    "hybrid": {"mesh": _last_dimension},
    "ignored_modules": {"ignored_params": (), "ignored_modules": ()},
    "meta-load": {"materialize": True},
    "model-precision": {"precision": Precision()},
    "no-shard": {"shards": True},
    "reshard-after-forward": {"reshard_after_forward": None},
    "reshard-to-size": {"reshard_after_forward": _without_size},
    "root-reshard": {"reshard_after_forward": None},
}

#: What begins the options that are settings of single units.
SETTINGS = "settings."

#: By capability, the methods of such an adapter that do nothing.
CALLS: Mapping[str, Sequence[str]] = {
    "async-unshard": ("unshard",),
    "manual-reshard": ("reshard",),
    "recovery": ("recover",),
    "reduction-hook": ("register_comm_hook",),
}


def made(base: type[Adapter], capability: str) -> dict[str, Any]:
    """The methods of the class that drives ``base`` and ignores a capability or an option.

    Raises:
        AttributeError: the capability is no option, setting or call.
    """
    options, fields = HEARD.get(capability), _settings(capability)
    if options is None and capability in OPTIONS and not fields:
        options = {capability: default_of(capability)}
    methods: dict[str, Any] = dict.fromkeys(CALLS.get(capability, ()), _nothing)
    if options is not None:

        def __init__(self: Any, model: Any, *, optimizer: Any, config: Config) -> None:
            base.__init__(self, model, optimizer=optimizer, config=_heard(config, options))

        methods["__init__"] = __init__
    if fields:

        def change(self: Any, settings: Settings, **where: Any) -> None:
            base.change(self, dataclasses.replace(settings, **dict.fromkeys(fields)), **where)

        methods["change"] = change
    if not methods:
        raise AttributeError(f"{capability} is no option of a configuration, no setting and no call: planted.ignoring")
    return methods


def _settings(capability: str) -> list[str]:
    """The fields of the settings of single units that an adapter does not hear that ignores a capability."""
    every = [one.name for one in dataclasses.fields(Settings)]
    return every if capability == Capability.UNIT_SETTINGS else [one for one in every if SETTINGS + one == capability]


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
