"""Private names of torch: no other file imports one, and a torch that lacks one still imports this package.

A name with a fallback is replaced by it. Another's place is taken by a class that raises when it is called, when an
object is made of a class derived from it, or when it is asked whether an object is an instance. Attributes of objects
(``_version``, ``_local_tensor``) are used where they are needed, and listed here all the same. Not listed are those
that subclasses of ``nn.Module`` are written against (``_parameters``, ``_buffers``, ``_modules``, ``_apply``,
``_load_from_state_dict``, and ``_metadata`` of state dicts), marks that torch leaves on objects, and what only a newer
torch than CI's has (:func:`sets_grad_dtype`).
"""

import contextlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from torch.distributed._composable_state import _State
    from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
    from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta


OLDEST = "2.11"
"""The oldest torch that is supported: with an older one the package does not import."""

if tuple(map(int, torch.__version__.split(".")[:2])) < tuple(map(int, OLDEST.split("."))):
    # Whoever looks for names that a torch lacks finds that of its version here.
    _TEXT = f"fsdp_impl needs torch {OLDEST} or later, and torch {torch.__version__} is installed"
    raise ImportError(_TEXT, name="torch.__version__")


class Name(NamedTuple):
    """A private name: its full path, what needs it, and what happens where torch has none."""

    path: str
    purpose: str
    without: str


_TABLE = """
torch.Tensor._base | backward of outputs changed in place | error when used
torch.Tensor._post_accumulate_grad_hooks | hooks of parameters | such hooks are not run
torch.Tensor._version | noticing writes to parameters | error when used
torch.UntypedStorage._cdata | noticing moved parameters in flat parameters | error when used
torch._C._autograd._profiler_enabled | the naming of ranges for profilers | no ranges
torch._C._current_graph_task_id | every backward | error when used
torch._C._dynamo.eval_frame.get_eval_frame_callback | leaving FSDP out of graphs | slower where nothing is compiled
torch._C._functorch.peek_interpreter_stack | models under torch.func | errors of torch under torch.func
torch._C._set_grad_enabled | switching autograd off | torch.set_grad_enabled, which is slower
torch._chunk_cat | the copy-in of gradients in fully_shard | a copy of each gradient more
torch._compile._disable_dynamo | leaving FSDP out of graphs | torch.compiler.disable, with which importing takes seconds
torch._foreach_add_ | accumulation in fully_shard | torch.foreach (2.15 and later); without either, error when used
torch._foreach_copy_ | the making of buffers in fully_shard | torch.foreach; without either, error when used
torch._foreach_mul_ | clipping | torch.foreach; without either, error when used, but for clipping with foreach=False
torch._foreach_norm | clipping | torch.foreach; without either, error when used, but for clipping with foreach=False
torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack | models under torch.func | error when used
torch.autograd.Variable._execution_engine.queue_callback | the end of backward | autograd.graph.queue_callback (2.15)
torch.autograd._unsafe_preserve_version_counter | a tensor subclass with hooks of the all-gather | error when used
torch.distributed.ProcessGroup._device_types | choosing an accelerator in flat parameters | error when used
torch.distributed.ProcessGroup._get_backend | memory of the process group | dist.get_backend_impl (2.14 and later)
torch.distributed._composable.contract._get_registry | fully_shard | error when used
torch.distributed._composable.contract.contract | fully_shard | error when used
torch.distributed._composable_state._State | fully_shard | error when used
torch.distributed._functional_collectives.AsyncCollectiveTensor | tensor parallelism in fully_shard | error when used
torch.distributed._symmetric_memory.get_mem_pool | set_symm_mem_for_comm | error when used
torch.distributed._symmetric_memory.set_backend | set_symm_mem_for_comm | error when used
torch.distributed.device_mesh.DeviceMesh._concatenate | tensor parallelism | error when used
torch.distributed.device_mesh.DeviceMesh._flatten | naming several mesh dimensions in fully_shard | error when used
torch.distributed.tensor.DTensor._local_tensor | everything with a DTensor | error when used
torch.distributed.tensor.DTensor._spec | everything with a DTensor | error when used
torch.distributed.tensor._dtensor_spec.DTensorSpec | everything with a DTensor | error when used
torch.distributed.tensor._dtensor_spec.TensorMeta | everything with a DTensor | error when used
torch.distributed.tensor._utils.compute_local_shape_and_global_offset | a tensor-parallel state dict | error when used
torch.distributed.tensor.placement_types._StridedShard | tensor parallelism | error when used
torch.nn.modules.batchnorm._BatchNorm | the default of MixedPrecision | the public classes of batch norm instead
torch.utils._python_dispatch.is_traceable_wrapper_subclass | moving parameters | what has __tensor_flatten__ is one
"""
NAMES = tuple(Name(*line.split(" | ")) for line in _TABLE.strip().splitlines())
_ROWS = {name.path: name for name in NAMES}


def missing() -> list[Name]:
    """Those of :data:`NAMES` that the installed torch lacks."""
    return [name for name in NAMES if _find(name.path) is None]


def _find(path: str) -> Any:
    with contextlib.suppress(ImportError, AttributeError):
        return pkgutil.resolve_name(path)
    return None


class _Missing(type):
    """Of the classes that take the place of missing names."""

    complaint: str

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(cls.complaint)

    def __instancecheck__(cls, _: Any) -> NoReturn:
        raise RuntimeError(cls.complaint)


def _take(path: str, fallback: Any = None) -> Any:
    name = _ROWS[path]
    found = _find(path) or fallback
    complaint = f"torch {torch.__version__} has no {path}, which {name.purpose} needs"
    return found or _Missing(path.rpartition(".")[2], (), {"complaint": complaint})


def _take_foreach(operation: str) -> Any:
    public = getattr(getattr(torch, "foreach", None), operation, None)
    return public or _take(f"torch._foreach_{operation}")


def _cat_of_chunks(tensors: Sequence[torch.Tensor], _: int, chunks: int, *, out: torch.Tensor) -> torch.Tensor:
    """``torch._chunk_cat`` along dimension 0."""
    padded = [torch.cat([tensor, tensor.new_zeros(-len(tensor) % chunks, *tensor.shape[1:])]) for tensor in tensors]
    return torch.cat([tensor.reshape(chunks, -1) for tensor in padded], dim=1, out=out)


def outside_func() -> contextlib.AbstractContextManager[Any]:
    """Leave the transforms of ``torch.func`` that are under way; imported here, because few need it."""
    context: contextlib.AbstractContextManager[Any] = _take(
        "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack"
    )()
    return context


def symmetric_memory(function: str) -> Any:
    """That ``function`` of symmetric memory; imported here, when it is used, because few need it."""
    return _take(f"torch.distributed._symmetric_memory.{function}")


if not TYPE_CHECKING:
    _State = _take("torch.distributed._composable_state._State")
    DTensorSpec = _take("torch.distributed.tensor._dtensor_spec.DTensorSpec")
    TensorMeta = _take("torch.distributed.tensor._dtensor_spec.TensorMeta")
State = _State

# Autograd and the compiler
current_graph_task_id: Callable[[], int] = _take("torch._C._current_graph_task_id")
# `None` where torch.compile does not look at the frames of this thread.
eval_frame_callback: Callable[[], Any] = _take(
    "torch._C._dynamo.eval_frame.get_eval_frame_callback", lambda: NotImplemented
)
disable_dynamo = _take("torch._compile._disable_dynamo", torch.compiler.disable)
# `None` where no function of torch.func is under way.
func_transform: Callable[[], Any] = _take("torch._C._functorch.peek_interpreter_stack", lambda: None)
set_grad_enabled: Callable[[bool], Any] = _take("torch._C._set_grad_enabled", torch.set_grad_enabled)
preserve_version_counter = _take("torch.autograd._unsafe_preserve_version_counter")
profiler_enabled: Callable[[], bool] = _take("torch._C._autograd._profiler_enabled", lambda: False)
# Calls a function when the running backward has computed all gradients.
queue_callback: Callable[[Callable[[], None]], None] = getattr(torch.autograd.graph, "queue_callback", None) or _take(
    "torch.autograd.Variable._execution_engine.queue_callback"
)

# Tensors
_batch_norm = _find("torch.nn.modules.batchnorm._BatchNorm")
_public_ones = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
batch_norms: tuple[type[nn.Module], ...] = _public_ones if _batch_norm is None else (_batch_norm,)
chunk_cat = _take("torch._chunk_cat", _cat_of_chunks)
foreach_add_, foreach_copy_, foreach_mul_ = map(_take_foreach, ("add_", "copy_", "mul_"))
foreach_norm = _take_foreach("norm")
is_wrapper_subclass: Callable[[torch.Tensor], bool] = _take(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass", lambda tensor: hasattr(tensor, "__tensor_flatten__")
)


def sets_grad_dtype(tensor: torch.Tensor) -> bool:
    """Whether user code has set ``tensor.grad_dtype``. Before torch 2.15 the tensor's own dtype counts as not set."""
    found: bool | None = getattr(tensor, "_has_grad_dtype_override", None)
    return tensor.grad_dtype != tensor.dtype if found is None else found


# Distributed
AsyncCollectiveTensor = _take("torch.distributed._functional_collectives.AsyncCollectiveTensor")
StridedShard = _take("torch.distributed.tensor.placement_types._StridedShard")
backend_of = getattr(dist, "get_backend_impl", None) or _take("torch.distributed.ProcessGroup._get_backend")
concatenate_meshes = _take("torch.distributed.device_mesh.DeviceMesh._concatenate")
flatten_mesh = _take("torch.distributed.device_mesh.DeviceMesh._flatten")
contract = _take("torch.distributed._composable.contract.contract")
registry_of = _take("torch.distributed._composable.contract._get_registry")
local_shape_and_offset = _take("torch.distributed.tensor._utils.compute_local_shape_and_global_offset")
