"""Broken adapter classes: each gets one line, and exit code 4, before any rank starts."""

import gc
import sys

import pytest

from shardproof.harness.adapters import registry
from shardproof.harness.adapters.base import Traits
from shardproof.harness.plugin.selection import resolve
from tests.errors import error_of
from tests.harness.inner import PASSES

HEAD = """
import dataclasses
from shardproof.testing import Capability
from shardproof.harness.adapters.base import Adapter, Traits
from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.replicas import DdpAdapter
"""

#: Bodies of a class that is otherwise the reference, with what the line says of the member.
BROKEN = {
    "availability-raises": ("def availability(cls, device_type): raise RuntimeError('no\\ndriver')",
        "availability() raised RuntimeError: no driver"),
    "availability-exits": ("def availability(cls, device_type): raise SystemExit(3)",
        "availability() raised SystemExit: 3"),
    "availability-of-another-type": ("def availability(cls, device_type): return True",
        "availability() is True; expected None, or one line that says why it cannot run"),
    "availability-of-two-lines": ("def availability(cls, device_type): return 'no driver\\nanywhere'",
        "cannot run here on cpu: no driver anywhere"),
    "availability-without-argument": ("def availability(cls): return None",
        "availability() does not take the arguments of availability(device_type): too many positional arguments"),
    "availability-of-an-instance": ("def availability(self, device_type): return None",
        "availability(self, device_type) does not take the arguments of availability(device_type): missing"),
    "constructor-with-other-arguments": ("def __init__(self, model, config): pass",
        "__init__(self, model, config) does not take the arguments of __init__(self, model, *, optimizer, config)"),
    "keyword-missing": ("def zero_grad(self): pass",
        "zero_grad(self) does not take the arguments of zero_grad(self, *, set_to_none)"),
    "no-method": ("step = None", "step is None; expected a method, step(self)"),
    "capabilities-raise": ("def capabilities(cls): raise KeyError('sharded')",
        "capabilities() raised KeyError: 'sharded'"),
    "capabilities-of-strings": ("def capabilities(cls): return ['sharded']",
        "capabilities() is ['sharded']; expected a frozenset of members of Capability and names of capability.OPTIONS"),
    "capabilities-misspelt": ("def capabilities(cls): return Capability.of('sharded defered-reduction')",
        "there is no capability 'defered-reduction': did you mean deferred-reduction"),
    "capability-that-was-divided": ("def capabilities(cls): return Capability.of('sharded mixed-precision')",
        "was divided into precision.param_dtype, precision.reduce_dtype and precision.buffer_dtype; declare those"),
    "capability-that-was-divided-as-an-attribute": (
        "def capabilities(cls): return frozenset({Capability.SHARDED, Capability.MIXED_PRECISION})",
        "was divided into precision.param_dtype, precision.reduce_dtype and precision.buffer_dtype; declare those"),
    "capability-that-was-renamed": ("def capabilities(cls): return Capability.of('sharded whole-parameters')",
        "the capability whole-parameters was renamed: it is summon-full-params"),
    "capability-that-was-renamed-as-an-attribute": (
        "def capabilities(cls): return frozenset({Capability.SHARDED, Capability.GATHERS_AHEAD})",
        "the capability gathers-ahead was renamed: it is backward-prefetch"),
    "capability-that-is-an-option": ("def capabilities(cls): return frozenset({Capability.CLIP_RAISES})",
        "the capability clip-raises was renamed: it is the option 'clip.error_if_nonfinite', by the name of its field"),
    "option-misspelt": ("def capabilities(cls): return Capability.of('clip.norm_types')",
        "there is no capability 'clip.norm_types': did you mean clip.norm_type"),
    "method-that-was-renamed": ("def whole_parameters(self, how): pass",
        "whole_parameters() was renamed: it is Adapter.summon_full_params()"),
    "capability-without-its-methods-of-fsdp1": (
        "def capabilities(cls): return ReferenceAdapter.capabilities() | Capability.of('reduction-hook')",
        "declares reduction-hook but does not define register_comm_hook()"),
    "method-of-fsdp1-that-was-renamed": ("def older_restore(self, state): pass",
        "older_restore() was renamed: it is Fsdp1Methods.load_legacy_optim_state_dict()"),
    "option-that-was-renamed": ("option_names = {'precision.compute': 'param_dtype'}",
        "option_names: 'precision.compute' was renamed: it is 'precision.param_dtype'"),
    "capability-misspelt-as-an-attribute": ("def capabilities(cls): return frozenset({Capability.DEFERED_REDUCTION})",
        "there is no capability 'DEFERED_REDUCTION': did you mean deferred-reduction"),
    "capability-without-its-methods": (
        "def capabilities(cls): return ReferenceAdapter.capabilities() | Capability.of('own-checkpoint')",
        "declares own-checkpoint but does not define save_own()"),
    "capability-without-its-attribute": (
        "def capabilities(cls): return ReferenceAdapter.capabilities() | Capability.of('fsdp1-api')",
        "declares fsdp1-api but does not define api"),
    "capabilities-none": ("def capabilities(cls): return None",
        "capabilities() is None; expected a frozenset of members of Capability and names of capability.OPTIONS"),
    "version-raises": ("def version(cls): raise ImportError('gone')", "version() raised ImportError: gone"),
    "source-of-another-type": ("def source(cls): return 3", "source() is 3; expected the name of a file, or None"),
    "version-of-another-type": ("def version(cls): return 3", "version() is 3; expected a string"),
    "name-missing": ("name = None", "name is None; expected a string by which ranks tell adapters apart"),
    "name-of-another-type": ("name = 3", "name is 3; expected a string"),
    "name-without-representation": ("name = type('Silent', (), {'__repr__': lambda self: 1 / 0})()",
        "name is an object of Silent; expected a string"),
    "traits-of-another-type": ("traits = {}", "traits is {}; expected an instance of shardproof.harness.adapters"),
    "traits-of-an-instance": ("@property\n    def traits(self): return Traits()", "traits is <property object at"),
    "traits-with-unknown-words": ("traits = Traits(shards={'weights'})",
        "does not import: ValueError: traits.shards = {'weights'}: expected a set of words out of parameters, gradie"),
    "local-numel-of-everything": ("traits = Traits(local_numel=lambda shape, size: shape.numel())",
        "traits.local_numel((1024, 1024), 2) is 1048576; expected a rank's share in elements, 524288 or little more"),
    "local-numel-raises": ("traits = Traits(local_numel=lambda shape: 1)", "traits.local_numel raised TypeError: "),
    "padding-without-limit": ("traits = Traits(collective_padding=1 << 20)",
        "traits.collective_padding is 1048576; expected at most 4096 elements"),
    "shards-nothing": ("traits = Traits(shards=frozenset())",
        "traits.shards is []; expected some of parameters, gradients, optimizer: an implementation that shards noth"),
    "claims-without-the-capability": ("def capabilities(cls): return frozenset({Capability.ADAM})",
        "expected 'parameters' among them exactly if capabilities() has Capability.SHARDED, which is missing"),
    "capability-without-the-claim": ("traits = Traits(shards=frozenset({'optimizer'}))",
        "expected 'parameters' among them exactly if capabilities() has Capability.SHARDED, which is declared"),
}  # fmt: skip

#: Modules that cannot be imported, or whose class cannot be looked at.
MODULES = {
    "module-exits": ("import sys\nsys.exit()", "module 'broken' does not import: SystemExit"),
    "module-interrupts": ("raise KeyboardInterrupt", "module 'broken' does not import: KeyboardInterrupt"),
    "module-raises-anything": ("class Gone(BaseException): pass\nraise Gone('two\\nlines')",
        "module 'broken' does not import: Gone: two lines"),
    "module-raises-at-length": ("raise RuntimeError('x' * 10_000)", "does not import: RuntimeError: xxx"),
    "methods-missing": (
        HEAD + "class Broken(Adapter): name = 'broken'",
        "the adapter 'Broken' does not define __init__, "
        "availability, capabilities, gradients, parameters",
    ),
    "name-never-given": (HEAD + "from shardproof.harness.adapters.dtensor import DTensorAdapter as Broken",
        "name is None; expected a string"),
    "unsharded-baseline-with-another-name": (HEAD + "class Broken(DdpAdapter): name = 'broken'",
        "traits.shards is []; expected some of parameters, gradients, optimizer"),
    "metaclass-raises": (
        HEAD + "class Meta(type(ReferenceAdapter)):\n"
        "    def __getattribute__(cls, name):\n"
        "        if name == 'name': raise RuntimeError('no names')\n"
        "        return super().__getattribute__(name)\n"
        "class Broken(ReferenceAdapter, metaclass=Meta): pass",
        "name raised RuntimeError: no names",
    ),
    "metaclass-raises-at-once": (
        HEAD + "class Meta(type(ReferenceAdapter)):\n"
        "    def __getattribute__(cls, name): raise ValueError('nothing here')\n"
        "class Broken(ReferenceAdapter, metaclass=Meta): pass",
        "ValueError: nothing here",
    ),
    "module-without-attributes": ("def __getattr__(name): raise RuntimeError(name)",
        "'Broken' cannot be examined: RuntimeError: "),
}  # fmt: skip


def source_of(body):
    body = f"@classmethod\n    {body}" if "(cls" in body else body
    return f"{HEAD}\nclass Broken(ReferenceAdapter):\n    name = 'broken'\n    {body}\n"


@pytest.fixture
def nothing_imported():
    """No test finds the module ``broken`` of another one."""
    sys.modules.pop("broken", None)
    yield
    sys.modules.pop("broken", None)
    # A subclass of Adapter is asked whenever another class is checked to be one, and classes are cycles.
    gc.collect()


@pytest.fixture
def module(nothing_imported, tmp_path, monkeypatch):
    """Write the module ``broken``."""
    monkeypatch.syspath_prepend(tmp_path)
    return (tmp_path / "broken.py").write_text


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("source", "says"),
    [
        *(pytest.param(source_of(body), says, id=kind) for kind, (body, says) in BROKEN.items()),
        *(pytest.param(source, says, id=kind) for kind, (source, says) in MODULES.items()),
    ],
)
def test_a_broken_class_is_one_line(module, source, says):
    module(source)
    text = error_of(resolve, impl="broken:Broken", device="cpu")
    assert text.startswith("implementation 'broken:Broken'") and says in text and len(text) < 600


def test_a_module_that_prints_is_as_good_as_any(module, capfd):
    module("print('hello')\n" + source_of("pass"))
    assert resolve(impl="broken:Broken", device="cpu").implementations
    assert capfd.readouterr().out == "hello\n"


def test_a_run_ends_with_exit_code_4(nothing_imported, refused, pytester):
    pytester.makepyfile(broken=source_of(BROKEN["availability-exits"][0]))
    pytester.syspathinsert()
    line = refused(PASSES, "--impl", "broken:Broken", "--device", "cpu")
    assert line.startswith("ERROR: implementation 'broken:Broken'")


AVAILABLE = [name for name in registry.BUILT_IN if registry.load(name).availability("cpu") is None]


@pytest.mark.parametrize("name", AVAILABLE)
def test_built_in_adapters_declare_what_they_should(name):
    assert name in resolve(impl=name, device="cpu").implementations


def test_the_baselines_alone_may_shard_nothing():
    assert resolve(impl="shardproof.harness.adapters.replicas:ReplicatedAdapter", device="cpu").implementations


# Traits


def test_by_default_everything_is_claimed():
    assert Traits().shards == {"parameters", "gradients", "optimizer"}


@pytest.mark.parametrize(
    ("trait", "value", "says"),
    [
        ("shards", "parameters", "a set of words out of parameters, gradients, optimizer"),
        ("shards", ["parameters"], "a set of words"),
        ("held_from_start", {"everything"}, "a set of words out of master, gradients, gathered"),
        ("local_numel", 3, "a function of a shape and a number of ranks"),
        ("collective_padding", -1, "a number of elements, 0 or more"),
        ("collective_padding", True, "a number of elements, 0 or more"),
        ("clips", "never", "one of call, step"),
        ("frees_models", "yes", "True or False"),
        ("simulates", None, "True or False"),
        ("isolation", [], "one of shared, adapter, case"),
    ],
)
def test_traits_have_values_of_their_kind(trait, value, says):
    assert error_of(Traits, **{trait: value}).startswith(f"traits.{trait} = {value!r}: expected {says}")
