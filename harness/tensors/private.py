"""The private names of torch that the harness uses, and the cases: no other file imports one.

A torch that lacks one still runs whatever does not need it. What can be done without is left out (:func:`mends`). Of
the other names a class takes the place that raises :class:`MissingName` when it is called, or when an object is made of
a class derived from it; a case in which that happens is unmet. Attributes of objects (``_schema``, ``_flatten``) are
used where they are needed, and listed here all the same. Not listed is what subclasses of ``nn.Module`` are written
against: ``_parameters``, ``_buffers``, ``_non_persistent_buffers_set``, ``_apply``, ``_version`` and the ``_metadata``
of state dicts.
"""

import contextlib
import pkgutil
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


class Name(NamedTuple):
    """A private name of torch, by its full path, with what needs it and what happens where torch has none."""

    path: str
    purpose: str
    without: str


class MissingName(RuntimeError):
    """The installed torch lacks a private name that is used. The text is one line, which names it."""


_UNMET = "these cases are unmet"
_UNSEEN = "not noticed"

NAMES = tuple(
    Name(f"torch.{path}", purpose, without)
    for path, purpose, without in (
        ("utils._python_dispatch.TorchDispatchMode", "recording collectives, in every case that trains", _UNMET),
        ("utils._python_dispatch._get_current_dispatch_mode_stack", "noticing dispatch modes left behind", _UNSEEN),
        ("ops.aten.add.Tensor._schema", "recording collectives, in every case that trains", _UNMET),
        ("_C._distributed_c10d._resolve_process_group", "recording functional collectives", _UNMET),
        # gloo
        ("distributed.ProcessGroupGloo._Options", "one thread for each gloo group (F-270)", "torch's own groups"),
        ("distributed.ProcessGroupGloo._Options._timeout", "the gloo workaround", "torch's own groups"),
        ("distributed.ProcessGroupGloo._Options._threads", "the gloo workaround", "torch's own groups"),
        ("distributed.ProcessGroupGloo._Options._devices", "the gloo workaround", "torch's own groups"),
        ("distributed.distributed_c10d.ProcessGroupGloo", "the gloo workaround", "torch's own groups"),
        # left-overs
        ("distributed._functional_collectives", "noticing functional collectives that are patched", _UNSEEN),
        ("nn.modules.module._global_forward_hooks", "noticing global hooks left behind", _UNSEEN),
        ("nn.modules.module._global_forward_pre_hooks", "noticing global hooks left behind", _UNSEEN),
        ("nn.modules.module._global_backward_hooks", "noticing global hooks left behind", _UNSEEN),
        ("nn.modules.module._global_backward_pre_hooks", "noticing global hooks left behind", _UNSEEN),
        ("nn.modules.module._global_parameter_registration_hooks", "noticing global hooks left behind", _UNSEEN),
        # the groups of a process
        ("distributed.distributed_c10d._world", "noticing process groups left behind, other worlds, simulation",
         "process groups are not noticed, other worlds and simulated cases are unmet"),
        ("distributed.distributed_c10d._get_default_store", "cases on several worlds in turn", _UNMET),
        *(
            (f"distributed.distributed_c10d.{name}", "cases on several worlds, and simulated ones", _UNMET)
            for name in (
                "_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag",
                "_update_default_pg",
            )
        ),
        ("_C._distributed_c10d._register_process_group", "cases on several worlds, and simulated ones", _UNMET),
        ("_C._distributed_c10d._unregister_process_group", "cases on several worlds, and simulated ones",
         _UNMET),
        # watching a training loop
        ("autograd.Variable._execution_engine", "reading gradients when a backward pass has ended",
         "the doctor does not run"),
        ("distributed.fsdp._flat_param._ShardParamInfo.intra_param_start_idx",
         "where parts of FSDP1's flat parameters lie", "the doctor watches no FSDP1"),
        ("nn.parallel.DistributedDataParallel._module_parameters", "parameters that have replaced those of DDP",
         _UNSEEN),
        ("distributed.fsdp.FSDPModule._get_fsdp_state", "the sharded parameters of units that are gathered",
         "gathered ones are taken for the model's own"),
        ("Tensor._base", "telling views of FSDP1's flat parameters from other tensors in their places",
         "the doctor does not run"),
        *(
            (path, "watching what torch.func transforms", "the doctor may not run within vmap()")
            for path in (
                "_C._functorch.peek_interpreter_stack", "_C._functorch.is_functorch_wrapped_tensor",
                "_C._functorch.get_unwrapped", "_functorch.pyfunctorch.temporarily_clear_interpreter_stack",
            )
        ),
        ("utils.data.dataloader._BaseDataLoaderIter", "the samplers of loaders that a loop does not keep", _UNSEEN),
        ("utils.data.dataloader._BaseDataLoaderIter._next_index", "the indices that loaders draw", _UNSEEN),
        ("nn.utils.clip_grad._get_total_norm", "noticing total norms", _UNSEEN),
        ("nn.utils.clip_grad._clip_grads_with_norm_", "noticing clipping", _UNSEEN),
        ("distributed.tensor.DTensor._op_dispatcher", "emptying DTensor's caches for another world", "they stay"),
        ("distributed.tensor._redistribute", "emptying DTensor's caches for another world", "they stay"),
        # simulation
        ("_subclasses.fake_tensor.FakeTensor", "simulated cases", _UNMET),
        ("_subclasses.fake_tensor.FakeTensorMode", "simulated cases", _UNMET),
        ("_subclasses.fake_tensor.in_kernel_invocation_manager", "simulating large worlds fast", "it takes longer"),
        ("Tensor._make_subclass", "simulating large worlds fast", "it takes longer"),
        ("_C._set_throw_on_mutable_data_ptr", "simulating large worlds fast", "it takes longer"),
        ("utils._mode_utils.no_dispatch", "simulated cases", _UNMET),
        ("testing._internal.distributed.fake_pg", "simulated cases", _UNMET),
        ("UntypedStorage._cdata", "simulated cases", _UNMET),
        ("distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached",
         "memory of DTensors in simulated cases", _UNMET),
        ("_subclasses.fake_tensor.DataDependentOutputException", "the reason why a model cannot be planned",
         "torch's own words"),
        ("_subclasses.fake_tensor.DynamicOutputShapeException", "the reason why a model cannot be planned",
         "torch's own words"),
        # implementations, and what they are composed with
        ("distributed._composable.replicate.replicate", "DDP in place, and replicated modules", _UNMET),
        ("distributed._composable.replicate_with_fsdp.replicate", "replication by units of FSDP", _UNMET),
        ("distributed._composable.replicate_with_fsdp.ReplicateModule", "replication by units of FSDP", _UNMET),
        *(
            (f"distributed.fsdp._fully_shard._fsdp_common.{name}", "parameters of one unit on several meshes", _UNMET)
            for name in ("ShardPlacementResult", "FSDPMeshInfo", "HSDPMeshInfo")
        ),
        ("distributed._composable.checkpoint_activation.checkpoint", "cases of recomputation by hooks", _UNMET),
        ("distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper",
         "cases of recomputation by a wrapper", _UNMET),
        *(
            (f"distributed.checkpoint.state_dict.{name}", "cases of state dicts of a patched model", _UNMET)
            for name in ("_patch_model_state_dict", "_patch_optimizer_state_dict", "_patched_state_dict")
        ),
        *(
            (f"distributed.algorithms._checkpoint.checkpoint_wrapper.{name}", "options of such wrappers", _UNMET)
            for name in ("offload_wrapper", "apply_activation_checkpointing", "CheckpointImpl")
        ),
        ("distributed.fsdp.FSDPModule._set_unshard_async_op", "calls that change no training", "it is not called"),
        ("distributed.tensor.placement_types._StridedShard", "cases of tensor parallelism", _UNMET),
        ("distributed.device_mesh.DeviceMesh._flatten", "cases on several mesh dimensions that count as one", _UNMET),
        ("distributed.tensor._dispatch.is_rng_supported_mesh", "the doctor's check of shards that are copies, on CPUs",
         "not checked on CPUs"),
        ("distributed.tensor.DTensor._local_tensor", "tensors with hooks of the all-gather", _UNMET),
        ("Tensor._backward_hooks", "gradients before hooks of user code", "the doctor does not see them"),
        ("Tensor._make_wrapper_subclass", "tensors with hooks of the all-gather", _UNMET),
        ("autograd._unsafe_preserve_version_counter", "tensors with hooks of the all-gather", _UNMET),
        ("distributed.optim.apply_optimizer_in_backward._apply_optimizer_in_backward", "optimizers in backward",
         _UNMET),
        ("_amp_foreach_non_finite_check_and_unscale_", "loss scaling with offloaded gradients", _UNMET),
        ("_dynamo", "starting ranks fast", "each of them imports it later"),
        ("_dynamo.package.DynamoCache._path_prefix", "precompiled code of a world apart from others'",
         "a case that precompiles is not apart"),
        ("_dynamo.backends.registry.lookup_backend", "cases of torch.compile", _UNMET),
        ("_C._current_graph_task_id", "counting recomputations, and random numbers that they draw", _UNMET),
        ("UntypedStorage._new_with_weak_ptr", "a census of the memory of units", _UNMET),
        ("cuda._sleep", "delays on a GPU", _UNMET),
        ("_C._get_privateuse1_backend_name", "cases for which such a device lacks a kernel", _UNMET),
        ("_C._cuda_clearCublasWorkspaces", "the benchmark of planned memory", "it does not run"),
    )
)  # fmt: skip
"""Every private name, with what needs it; the tests compare it with the source."""

_ROWS = {name.path: name for name in NAMES}

#: What is left out where torch lacks one of these names; what they are for is not what a case checks.
_LEFT_OUT = {
    "gloo": tuple(path for path in _ROWS if "ProcessGroupGloo" in path),
    "left-overs": tuple(name.path for name in NAMES if name.purpose.startswith("noticing")),
    "simulation": tuple(name.path for name in NAMES if name.purpose == "simulating large worlds fast"),
    "DTensor's caches": tuple(name.path for name in NAMES if "caches" in name.purpose),
}

_COMPLAINT = re.compile(r"torch \S+ has no torch\.[\w.]+, which .+ needs")


def missing() -> list[Name]:
    """Return those of :data:`NAMES` that the installed torch lacks."""
    has_cuda = torch.version.cuda is not None
    return [name for name in NAMES if find(name.path) is None and (has_cuda or "._cuda_" not in name.path)]


def find(path: str) -> Any:
    """Return what a name of the table stands for, or None where torch lacks it."""
    assert path in _ROWS, f"{path} is not listed"
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None


def take(path: str) -> Any:
    """Return what a name of the table stands for, or a class in its place that raises when it is used."""
    found = find(path)
    return _Missing(path.rpartition(".")[2], (), {"complaint": complaint_about(path)}) if found is None else found


def need(path: str) -> Any:
    """Return what a name of the table stands for.

    Raises:
        MissingName: torch lacks it.
    """
    found = find(path)
    if found is None:
        raise MissingName(complaint_about(path))
    return found


def put(path: str, value: Any) -> None:
    """Let a name of the table stand for another value in this process."""
    owner, _, name = path.rpartition(".")
    setattr(pkgutil.resolve_name(owner), name, value)


def complaint_about(path: str) -> str:
    """Return the line that names a missing name and what needs it."""
    return f"torch {torch.__version__} has no {path}, which {_ROWS[path].purpose} needs"


def complaint_of(error: BaseException) -> str:
    """Return the line that names the private name whose lack has led to an error; empty if none has.

    The reference implementation has a table of its own, whose errors have the same text.
    """
    for one in _chain(error):
        text = ""
        with contextlib.suppress(Exception):  # a case may raise an error that has no text
            text = str(one)
        if found := _COMPLAINT.search(text):
            return found.group()
        if isinstance(one, AttributeError) and one.name is not None:
            # An attribute of an object, which no stand-in can take the place of.
            for path in _ROWS:
                if path.endswith(f".{one.name}") and one.name.startswith("_") and find(path) is None:
                    return complaint_about(path)
    return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def empty_dtensor_caches() -> None:
    """Empty the caches in which DTensor keeps what it has found out about placements on a mesh."""
    propagator = getattr(find("torch.distributed.tensor.DTensor._op_dispatcher"), "sharding_propagator", None)
    redistribute = find("torch.distributed.tensor._redistribute")
    owners = (
        (getattr(getattr(propagator, "propagate_op_sharding", None), "cache", None), "cache_clear"),
        (getattr(type(propagator), "_propagate_tensor_meta_cached", None), "cache_clear"),
        (getattr(propagator, "_propagate_tensor_meta", None), "cache_clear"),
        (torch._C, "_clear_DTensor_sharding_propagator_cache"),
        (redistribute, "clear_redistribute_planner_cache"),
        (getattr(redistribute, "_gen_transform_infos", None), "cache_clear"),
    )
    for owner, name in owners:
        clear = getattr(owner, name, None)  # which of them exist depends on torch's version
        if clear is not None:
            clear()


def mends() -> dict[str, str]:
    """Return what is left out because the installed torch lacks a name, and why, in one line each."""
    lacking = {part: [path for path in paths if find(path) is None] for part, paths in _LEFT_OUT.items()}
    return {
        part: f"not applied: torch {torch.__version__} has no {', '.join(paths)}"
        for part, paths in lacking.items()
        if paths
    }


class _Missing(type):
    """The class of the classes that take the place of missing names."""

    complaint: str

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise MissingName(cls.complaint)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingName(cls.complaint)


if not TYPE_CHECKING:
    TorchDispatchMode = take("torch.utils._python_dispatch.TorchDispatchMode")
