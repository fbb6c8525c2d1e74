"""What happens without the private names of torch that the reference takes.

That no other file takes one, and what trains without one, is in tests/test_private_names.py.
"""

import importlib.util
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_impl.common import private

FILE = Path(private.__file__)


def test_this_torch_lacks_none() -> None:
    assert private.missing() == []


# Without a name


def without(path: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The file as it is in a torch that lacks ``path`` and has no public name in its place."""
    resolve = pkgutil.resolve_name

    def missing(wanted: str) -> Any:
        if wanted == path:
            raise AttributeError(path)
        return resolve(wanted)

    monkeypatch.setattr(pkgutil, "resolve_name", missing)
    monkeypatch.delattr(torch, "foreach", raising=False)
    monkeypatch.delattr(torch.autograd.graph, "queue_callback", raising=False)
    monkeypatch.delattr(torch.distributed, "get_backend_impl", raising=False)
    spec = importlib.util.spec_from_file_location("private_without", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Used where they are, or imported when they are used.
IN_PLACE = ("torch.Tensor.", "torch.UntypedStorage.", "torch.distributed.tensor.DTensor.")
IN_PLACE += (
    "torch.distributed.ProcessGroup._device_types",
    "torch.distributed._symmetric_memory.",
    "torch._functorch.",
)
# Those whose fallback is a public name of newer versions.
NEWER = {"_foreach_add_", "_foreach_copy_", "_foreach_mul_", "_foreach_norm", "queue_callback", "_get_backend"}


@pytest.mark.parametrize("name", [name for name in private.NAMES if not name.path.startswith(IN_PLACE)], ids=str)
def test_without(name: private.Name, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name without a fallback is replaced by what raises when it is used; others by something that works."""
    module = without(name.path, monkeypatch)
    assert [row.path for row in module.missing()] == [name.path]
    stand_ins = [value for value in vars(module).values() if isinstance(value, module._Missing)]
    is_fatal = name.without == "error when used" or name.path.rpartition(".")[2] in NEWER
    assert bool(stand_ins) == is_fatal
    for stand_in in stand_ins:
        complaint = f"torch {torch.__version__} has no {name.path}, which {name.purpose} needs"
        uses = [stand_in, type("Derived", (stand_in,), {}), lambda kind=stand_in: isinstance(0, kind)]
        for use in uses:
            with pytest.raises(RuntimeError) as caught:
                use()
            assert str(caught.value) == complaint


def test_symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    module = without("torch.distributed._symmetric_memory.get_mem_pool", monkeypatch)
    with pytest.raises(RuntimeError, match="get_mem_pool, which set_symm_mem_for_comm needs"):
        module.symmetric_memory("get_mem_pool")(torch.device("cpu"))


def test_outside_of_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    module = without("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", monkeypatch)
    with pytest.raises(RuntimeError, match=r"interpreter_stack, which models under torch\.func needs"):
        module.outside_func()


@pytest.mark.parametrize("operation", ["add_", "copy_", "mul_", "norm"])
def test_operations_on_lists(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public operation, where there is one, and the private one do what they are named after."""
    arguments: Any = {"mul_": torch.tensor(3.0), "norm": None}.get(operation, [torch.randn(4), torch.randn(2, 2)])

    def run(function: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        tensors = [torch.randn(4), torch.randn(2, 2)]
        if operation == "norm":
            return list(function(tensors, ord=3.0, dtype=torch.float64))
        function(tensors, arguments)
        return tensors

    chosen = run(getattr(private, f"foreach_{operation}"))
    older = run(getattr(without("", monkeypatch), f"foreach_{operation}"))
    assert all(map(torch.equal, chosen, older))
    if operation == "norm":
        alone = run(lambda tensors, ord, dtype: [torch.linalg.vector_norm(one, ord, dtype=dtype) for one in tensors])
        torch.testing.assert_close(chosen, alone)
    else:
        others = arguments if isinstance(arguments, list) else [arguments] * 2
        alone = run(lambda tensors, _: [getattr(one, operation)(to) for one, to in zip(tensors, others, strict=True)])
        assert all(map(torch.equal, chosen, alone))


def test_callbacks_at_the_end_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    older = without("", monkeypatch).queue_callback
    for queue in (private.queue_callback, older):
        seen: list[str] = []
        first, last = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)

        def on_grad(_: torch.Tensor, seen: list[str] = seen, queue: Any = queue) -> None:
            seen.append("gradient")
            queue(lambda: seen.append("end"))

        for leaf in (first, last):
            leaf.register_hook(on_grad)
        (first * last).sum().backward()
        assert seen == ["gradient", "gradient", "end", "end"]


def test_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fallbacks take the same modules for batch norms, and the same tensors for wrappers, as torch."""
    name = "torch.utils._python_dispatch.is_traceable_wrapper_subclass"
    wrapper = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    for tensor, expected in ((torch.ones(1), False), (nn.Parameter(torch.ones(1)), False), (wrapper, True)):
        assert private.is_wrapper_subclass(tensor) == expected
        assert without(name, monkeypatch).is_wrapper_subclass(tensor) == expected
    public = without("torch.nn.modules.batchnorm._BatchNorm", monkeypatch).batch_norms
    modules = [nn.BatchNorm1d(1), nn.BatchNorm2d(1), nn.BatchNorm3d(1), nn.SyncBatchNorm(1), nn.LayerNorm(1)]
    assert [isinstance(m, public) for m in modules] == [isinstance(m, private.batch_norms) for m in modules]
