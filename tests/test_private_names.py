"""Names of torch that are taken: private ones stand in one file each of the harness and the reference, and none stops
a run; of its peer the reference takes none.
"""

import ast
import json
import re
from pathlib import Path

import pytest

from fsdp_impl.common import private as private_of_the_reference
from shardproof.harness.tensors import private
from tests.harness.inner import python
from tests.names_of_torch import HIDING, files_of, imported_from_torch, nodes_of, paths_of_torch

pytestmark = pytest.mark.sampled

ROOT = Path(__file__).parents[1]
FOLDERS = ("harness", "suites", "shardproof", "benchmarks", "reports")

OF_MODULES = "what subclasses of nn.Module are written against"

#: Attributes of objects whose class a scan cannot tell, by the reason why they may stand where they are. Those that the
#: tables list by the class of the object may too.
OF_OBJECTS = {
    OF_MODULES: {"_apply", "_buffers", "_metadata", "_non_persistent_buffers_set", "_parameters", "_version"},
    "marks that torch and spmd_types leave on objects": {
        "_checkpoint_wrapped_module", "_comm_hook", "_comm_hooks", "_compiled_call_impl", "_in_backward_optimizers",
        "_local_type",
    },
    "our own marks on parameters": {"_fsdp_flat_managed", "_fsdp_impl_changes", "_fsdp_impl_serial"},
    "options of gloo, which are read before they are set": {"_devices", "_options", "_threads", "_timeout"},
    "of the registry of groups, which the table has": {"_pg_coalesce_state"},
    "of the state of FSDP2's units, which the table has": {"_fsdp_param_group", "_fsdp_param_groups"},
    "a documented member of a public enumeration": {"_HYBRID_SHARD_ZERO2"},
    "of schedulers that are made of others, which say nothing without it": {"_schedulers"},
    "of nodes of a graph of autograd, which say nothing without them": {
        "_forward_cls", "_saved_other", "_saved_pad", "_saved_reduction",
    },
    "of what iterates over a loader, which the table has": {
        "_collate_fn", "_dataset", "_index_sampler", "_num_workers", "_num_yielded", "_sampler_iter",
    },
    "of the flat parameters of FSDP1, which the table has": {
        "_fqns", "_is_padding_mask", "_numels_with_padding", "_param_infos", "_params", "_shard_param_infos",
        "_shared_param_infos", "_sharded_size",
    },
    "not torch's: of Python, pytest, execnet, hypothesis, DeepSpeed and torchtitan": {
        "_DummyThread", "_anonymous", "_args_from_interpreter_flags", "_children", "_exit", "_fields", "_forkserver",
        "_getframe", "_groups", "_io", "_lru_cache_wrapper", "_make", "_tw", "_wrap_class_cache",
    },
}  # fmt: skip


def paths_where(is_so, file, nodes):
    """One line for each path of torch in a file of which this is true."""
    return [f"{file}:{line}: {path}" for line, path in paths_of_torch(nodes) if is_so(path)]


def is_private(path):
    parts = [one for one in path.split(".")[1:] if one not in OF_OBJECTS[OF_MODULES]]
    return any(one.startswith("_") and not one.startswith("__") for one in parts) or "distributed_c10d" in parts[:-1]


def attributes_of_objects(nodes):
    """Each private attribute that a file reads or sets of something else than itself: (line, name)."""
    bound = {*imported_from_torch(nodes), "self", "cls"}
    for node in nodes:
        match node:
            case ast.Attribute(value=value, attr=name):
                pass
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[value, ast.Constant(value=str(name)), *_]):
                pass
            case _:
                continue
        if name.startswith("_") and not name.startswith("__"):
            while isinstance(value, ast.Attribute):
                value = value.value
            if not isinstance(value, ast.Name) or value.id not in bound:
                yield node.lineno, name


def own_names(files):
    """The private names that the files define themselves."""
    for nodes in files:
        for node in nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    yield node.attr
            elif isinstance(node, ast.alias):
                yield node.asname or node.name


def found_outside(files, table, names=()):
    """What stands outside of the table of these names: one line for each private name of torch."""
    others = {path: nodes for path, nodes in files.items() if path != table}
    listed = {name.path.rpartition(".")[2] for name in names}
    allowed = listed.union(own_names(files.values()), *OF_OBJECTS.values())
    lines = [line for path, nodes in others.items() for line in paths_where(is_private, path, nodes)]
    for path, nodes in others.items():
        found = [one for one in attributes_of_objects(nodes) if one[1] not in allowed]
        lines += [f"{path}:{line}: an attribute {name}" for line, name in found]
    return sorted(set(lines))


#: The files that may take private names, the names that they list, for which folders, and how many files these have.
TABLES = [
    ("harness/tensors/private.py", private.NAMES, FOLDERS, 200),
    ("fsdp_impl/common/private.py", private_of_the_reference.NAMES, ("fsdp_impl",), 30),
]


def test_private_names_stand_in_one_file():
    """Of each of the two: one test, the first of the file, runs by day."""
    for table, names, folders, least in TABLES:
        files = files_of(*folders)
        assert len(files) > least, "the folders have moved"
        assert found_outside(files, table, names) == []


@pytest.mark.parametrize(
    "line",
    [
        "from torch._C import _register_process_group",
        "import torch.utils._pytree as pytree",
        "import torch\ntorch._C._current_graph_task_id()",
        "from torch.distributed import distributed_c10d as c10d\nc10d.default_pg_timeout",
        "from torch import nn\nnn.modules.batchnorm._BatchNorm",
        "def f(tensor): return tensor._is_view()",
        "from torch._compile import _disable_dynamo",
        "from torch.distributed import _functional_collectives",
        "import torch\ntorch._foreach_add_([], [])",
        "import torch\ncast(Any, torch.autograd)._unsafe_preserve_version_counter",
        "import torch.distributed as dist\ngetattr(dist, '_world')",
        "from torch.distributed.device_mesh import DeviceMesh as Mesh\nMesh._concatenate([])",
    ],
)
def test_a_private_name_elsewhere_is_found(line):
    assert found_outside({"a.py": nodes_of(line)}, "b.py")


PEER = re.compile(r"^torch\.distributed\.(fsdp|_composable\.fsdp)\b")


@pytest.mark.parametrize(
    "line",
    [
        "import torch.distributed.fsdp",
        "import torch.distributed.fsdp as peer",
        "from torch.distributed import fsdp",
        "from torch.distributed.fsdp import fully_shard",
        "from torch.distributed.fsdp._fully_shard import _fsdp_param",
        "from torch.distributed._composable.fsdp import fully_shard",
        "import torch\ntorch.distributed.fsdp.fully_shard(model)",
        "import torch.distributed as dist\ndist.fsdp.fully_shard(model)",
    ],
)
def test_a_loan_from_the_peer_is_seen(line):
    assert any(PEER.match(path) for _, path in paths_of_torch(nodes_of(line)))


def test_the_reference_borrows_nothing_from_its_peer():
    """import-linter sees torch as one package, so it cannot tell its parts."""
    files = files_of("fsdp_impl")
    assert [line for path, nodes in files.items() for line in paths_where(PEER.match, path, nodes)] == []


@pytest.mark.parametrize(("table", "names", "folders", "least"), TABLES, ids=["harness", "reference"])
def test_every_name_that_is_listed_is_in_the_source(table, names, folders, least):
    """Taken by its path or by the last part of it, or an attribute of an object."""
    text = "".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    own = (ROOT / table).read_text()
    text, unused = text.replace(own, ""), []
    for path in (name.path for name in names):
        last = path.rpartition(".")[2]
        is_taken = any(found in text for found in (path, f".{last}", f'"{last}"'))
        if not is_taken and own.count(last) < 2 and f'"{last.removeprefix("_foreach_")}"' not in own:
            unused.append(path)
    assert unused == []


# What a torch without a name does


CASES = """
import os
from shardproof.harness.tensors import private
from shardproof.testing import models, simulated, world

@world(2)
def test_nothing(rank):
    assert rank.world_size == 2

@world(2)
def test_training(rank):
    pair = rank.pair(models.Tower(dim=5), units=models.Tower(dim=5).units())
    pair.step(rank.batch(0, (2, 5)))
    pair.check()

@world(1)
def test_use(rank):
    private.need(os.environ["TORCH_LACKS"])

@simulated()
def test_simulation(rank):
    from shardproof.harness.adapters.config import Config
    from shardproof.harness.models import optim
    from shardproof.harness.simulation.training import Simulation
    from shardproof.harness.simulation.world import simulated_world
    import torch
    with simulated_world(rank.simulates, rank=1) as made:
        one = Simulation(made, rank.implementation, lambda: models.Tower(dim=4), config=Config(mesh=made.mesh()),
                         optimizer=optim.sgd())
        one.step(lambda: (torch.zeros(2, 4),), loss=models.mean_square)
        one.close()
"""
EVERYONE = ("reference", "reference.flat", "torch.fully_shard")
#: By a name that the reference lacks, which of its halves stop.
STOPPED = {
    "torch._C._autograd._profiler_enabled": set(),  # left out
    "torch._chunk_cat": set(),  # replaced
    "torch._compile._disable_dynamo": set(),  # replaced, when the package is imported
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": set(),  # of a feature that is not used
    "torch.distributed._composable_state._State": {"reference"},
    "torch._C._current_graph_task_id": {"reference", "reference.flat"},
}


def run_without(folder, *options, impl=EVERYONE, torch=None, **environment):
    """Run the cases in a process that sees another torch; return the exit code, what it printed and the run file."""
    folder.joinpath("test_cases.py").write_text(CASES)
    folder.joinpath("pytest.ini").write_text("[pytest]\n")
    options = ("-rs", "--impl", ",".join(impl), "--device", "cpu", "--report", "run.json", *options)
    words = ("test_cases.py", "-p", "shardproof.plugin", "-p", "no:cacheprovider", *options)
    done = python("-m", "pytest", *words, cwd=folder, timeout=600, PYTHONPATH=HIDING, **environment)
    file = folder / "run.json"
    return done.returncode, done.stdout + done.stderr, json.loads(file.read_text()) if file.exists() else None


def verdicts(run):
    return {(case["implementation"], case["id"].partition("::")[2].partition("[")[0]): case for case in run["cases"]}


def check_without(path, folder, *, is_of_the_reference=False):
    """Run without one name: nothing ends the run, and what the name stops says so."""
    code, printed, run = run_without(folder, TORCH_LACKS=path)
    assert code in (0, 1, 5, 6), printed
    cases = verdicts(run)
    assert not [case for case in cases.values() if case["verdict"] == "harness-error"], printed
    for implementation in EVERYONE:
        if not is_of_the_reference or implementation == "torch.fully_shard":
            assert cases[implementation, "test_nothing"]["verdict"] == "pass", printed
    if not is_of_the_reference:
        for implementation in EVERYONE:
            used = cases[implementation, "test_use"]
            assert used["verdict"] == "unmet" and path in used["missing"][0], printed
            assert cases[implementation, "test_training"]["verdict"] in ("pass", "unmet"), printed
    for case in cases.values():
        if case["verdict"] == "unmet":
            assert path in "".join(case["missing"]) or "does not import" in case["missing"][0], printed
    return cases


@pytest.mark.nightly
@pytest.mark.parametrize("path", [name.path for name in private.NAMES])
def test_a_torch_without_a_name(tmp_path, path):
    if private.find(path) is None:
        pytest.skip(f"this build of torch has no {path}")
    check_without(path, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("path", [name.path for name in private_of_the_reference.NAMES])
def test_a_torch_without_a_name_of_the_reference(tmp_path, path):
    """Stopped is what needs the name, and says so."""
    cases = check_without(path, tmp_path, is_of_the_reference=True)
    trained = {name: cases[name, "test_training"] for name in EVERYONE[:2]}
    stopped = {name: case for name, case in trained.items() if case["verdict"] != "pass"}
    assert stopped.keys() == STOPPED.get(path, stopped.keys())
    # No stand-in can take the place of what a tensor lacks: Python names it.
    says = f"no attribute {path.rpartition('.')[2]!r}" if path.startswith("torch.Tensor.") else path
    for case in stopped.values():
        assert says in "".join([*case["missing"], (case["failure"] or {"text": ""})["text"]]), case


@pytest.mark.nightly
@pytest.mark.parametrize("path", [name.path for name in private.NAMES if "simulat" in name.purpose])
def test_a_simulation_without_a_name(tmp_path, path):
    code, printed, run = run_without(tmp_path, "--simulate", "64", TORCH_LACKS=path)
    assert code in (0, 1, 5, 6), printed
    for case in run["cases"]:
        assert case["verdict"] in ("pass", "unmet"), printed
        assert case["verdict"] == "pass" or path in case["missing"][0], printed


@pytest.mark.nightly
def test_a_name_that_cases_need(tmp_path):
    """A case that uses it is unmet, the others pass; a simulated one says it in one line."""
    path = "torch._C._distributed_c10d._register_process_group"
    check_without(path, tmp_path)
    code, printed, run = run_without(tmp_path, "--simulate", "64", impl=["reference"], TORCH_LACKS=path)
    assert code == 5, printed
    (case,) = run["cases"]
    assert (case["verdict"], len(case["missing"])) == ("unmet", 1), printed
    assert case["missing"][0].endswith(private.complaint_about(path).partition(" has ")[2]), printed


def test_a_mend_that_is_left_out(tmp_path):
    """It is left out with a line in the header, in the run file and in its report; cases pass."""
    path = "torch.distributed.ProcessGroupGloo._Options._threads"
    code, printed, run = run_without(tmp_path, "-k", "training", impl=["reference"], TORCH_LACKS=path)
    assert code == 0, printed
    assert printed.count("shardproof: gloo: not applied: ") == 1, printed
    assert path in run["environment"]["mends"]["gloo"]
    report = python("-m", "shardproof", "report", tmp_path / "run.json")
    assert f"gloo: {run['environment']['mends']['gloo']}" in report.stdout


ADAPTER = """
from shardproof.harness.adapters.reference import ReferenceAdapter
{line}
class Adapter(ReferenceAdapter):
    name = "broken"
"""


@pytest.mark.parametrize("line", ["from torch.distributed import _no_such_name", "import torch; torch._no_such_name"])
def test_an_implementation_that_does_not_import_because_of_torch(tmp_path, line):
    tmp_path.joinpath("broken.py").write_text(ADAPTER.format(line=line))
    code, printed, run = run_without(tmp_path, "-k", "nothing", impl=["broken:Adapter", "ddp"], PYTHONSAFEPATH="")
    assert code == 6, printed
    cases = verdicts(run)
    assert cases["ddp", "test_nothing"]["verdict"] == "pass"
    broken = cases["broken:Adapter", "test_nothing"]
    assert broken["verdict"] == "unmet"
    assert broken["missing"][0].startswith("broken:Adapter does not import: "), broken
    assert "_no_such_name" in broken["missing"][0]


@pytest.mark.parametrize("line", ["import no_such_package", "no_such_name"])
def test_another_implementation_that_does_not_import_ends_the_run(tmp_path, line):
    tmp_path.joinpath("broken.py").write_text(ADAPTER.format(line=line))
    code, printed, _ = run_without(tmp_path, impl=["broken:Adapter", "ddp"])
    assert code == 4 and "does not import" in printed, printed


def test_a_torch_of_tomorrow(tmp_path):
    version = "2.17.0.dev1+git"
    code, printed, run = run_without(tmp_path, "-k", "training", impl=["reference"], TORCH_CALLS_ITSELF=version)
    assert code == 0, printed
    assert printed.count("newer than") == 1, printed
    assert "shardproof: torch 2.17 is newer than the newest tested one, 2.15\n" in printed
    assert run["environment"]["torch"] == version


def test_the_command_lists_what_is_missing():
    path = "torch._C._current_graph_task_id"
    done = python("-m", "shardproof", "torch-names", PYTHONPATH=HIDING, TORCH_LACKS=path, code=1)
    purpose = "counting recomputations, and random numbers that they draw"
    assert f"\n  {path}\n    for {purpose}; without it: these cases are unmet\n" in done.stdout
    wrong = python("-m", "shardproof", "torch-names", "--what")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
