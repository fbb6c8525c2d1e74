"""The list of the private names of torch that the reference takes, and what happens without them.

That no other file takes one, and what trains without one, is in tests/test_private_names.py.
"""

import ast
import importlib.util
import itertools
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_impl
from fsdp_impl.common import private

ROOT = Path(fsdp_impl.__file__).parent
FILE = Path(private.__file__)
OTHERS = sorted(path for path in ROOT.rglob("*.py") if path != FILE)
# What subclasses of modules are written against, and of named tuples; marks that torch leaves on objects; the method by
# which policies of wrapping are called, torch's and ours; what spmd_types sets on the parameters that it annotates.
UNLISTED = {"_parameters", "_buffers", "_modules", "_apply", "_load_from_state_dict", "_metadata", "_make", "_fields"}
UNLISTED |= {"_in_backward_optimizers", "_checkpoint_wrapped_module", "_run_policy", "_local_type"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and "fsdp" not in name


def test_private_attributes_of_objects_are_listed() -> None:
    own, used = set(UNLISTED), {}
    for path in OTHERS:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Dict(keys=keys):  # of a class that is made by calling type
                    own |= {key.value for key in keys if isinstance(key, ast.Constant)}
                case ast.Attribute(attr=name) if is_private(name):
                    used[name] = path.name
                case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
                    if is_private(name):
                        used[name] = path.name
    listed = {name.path.rpartition(".")[2] for name in private.NAMES}
    assert {name: file for name, file in used.items() if name not in own | listed} == {}


def test_every_row_is_used() -> None:
    """A row whose name nothing takes any more has to go."""
    words = set()
    for path in [FILE, *OTHERS]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                words.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
    words |= {f"torch._foreach_{word}" for word in words}
    unused = [name.path for name in private.NAMES if not {name.path, name.path.rpartition(".")[2]} & words]
    assert not unused


def test_rows_are_sorted_and_complete() -> None:
    paths = [name.path for name in private.NAMES]
    assert paths == sorted(set(paths))
    assert all(part == part.strip() != "" for name in private.NAMES for part in name)


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
IN_PLACE += ("torch.distributed.ProcessGroup._device_types", "torch.distributed._symmetric_memory.")
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


SHAPES = [[(5, 3)], [(1,), (4, 2), (7,)], [(2, 3, 2, 2), (3,)], [(8, 1), (3, 3)]]


@pytest.mark.parametrize(("shapes", "chunks"), [*itertools.product(SHAPES, [1, 2, 3, 4])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_are_put_together_alike(
    shapes: list[tuple[int, ...]], chunks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    if len(shapes[0]) == 4:
        tensors[0] = tensors[0].to(memory_format=torch.channels_last)
    padded = [-(-len(tensor) // chunks) * tensor[0].numel() for tensor in tensors]
    outputs = [torch.full((chunks, sum(padded)), 7.0, dtype=dtype) for _ in range(2)]
    for chunk_cat, out in zip(
        [torch._chunk_cat, without("torch._chunk_cat", monkeypatch).chunk_cat], outputs, strict=True
    ):
        chunk_cat(tensors, 0, chunks, out=out)
    assert torch.equal(*outputs)


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
