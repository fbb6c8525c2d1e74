"""Makes a process see another torch: one that lacks a private name, or that calls itself another version.

The folder of this file on PYTHONPATH, every Python process imports it as it starts. The name is in the environment. It
is hidden from all code but torch's own: a torch that lacks it would not use it either.
"""

import builtins
import dis
import importlib.abc
import importlib.machinery
import inspect
import os
import pkgutil
import sys
import types

_OPERATIONS = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")


def _is_asked_by_others(frame):
    """Whether code outside of torch asks by name; what torch's C++ code reads while such code calls it is torch's."""
    is_direct = True
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] in ("pkgutil", "importlib"):
            is_direct, frame = False, frame.f_back
            continue
        if name.partition(".")[0] in ("torch", "functorch"):
            return False
        return not is_direct or dis.opname[frame.f_code.co_code[frame.f_lasti]] in _OPERATIONS
    return False


class _Hidden:
    """Takes the place of an attribute of a class."""

    def __init__(self, raw, owner, name):
        self._raw, self._owner, self._name = raw, owner, name

    def __get__(self, instance, owner=None):
        if _is_asked_by_others(sys._getframe(1)):
            raise AttributeError(
                f"no attribute {self._name!r}", name=self._name, obj=self._owner if instance is None else instance
            )
        if self._raw is None:
            return vars(instance)[self._name]
        get = getattr(type(self._raw), "__get__", None)
        return self._raw if get is None else get(self._raw, instance, owner)

    def __set__(self, instance, value):
        if hasattr(type(self._raw), "__set__"):
            self._raw.__set__(instance, value)
        else:
            vars(instance)[self._name] = value


def _hide_in_module(module, name):
    class Lacking(type(module)):
        def __getattribute__(self, asked):
            if asked == name and _is_asked_by_others(sys._getframe(1)):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}", name=name, obj=module)
            return super().__getattribute__(asked)

    module.__class__ = Lacking


def _hide(path):
    """Hide a name as soon as what has it exists; return whether it is hidden."""
    owner_path, _, name = path.rpartition(".")
    first, *rest = owner_path.split(".")
    owner = sys.modules[first]
    for index, part in enumerate(rest):
        before = owner
        owner = sys.modules.get(".".join([first, *rest[: index + 1]])) or inspect.getattr_static(owner, part, None)
        if owner is None:
            return False
        if isinstance(owner, types.ModuleType) and part == "ops":  # its attributes are made when they are read
            owner = sys.modules["torch._ops"].OpOverload
            break
    if isinstance(owner, types.ModuleType):
        _hide_in_module(owner, name)
    elif isinstance(owner, type):
        raw = inspect.getattr_static(owner, name, None)
        setattr(owner, name, _Hidden(raw, owner, name))
    else:
        setattr(before, part, _Without(owner, name))
    return True


class _Without:
    """Takes the place of an object of a class that cannot be changed."""

    def __init__(self, whole, name):
        self._whole, self._name = whole, name

    def __getattr__(self, asked):
        if asked == self._name and _is_asked_by_others(sys._getframe(1)):
            raise AttributeError(f"no attribute {asked!r}", name=asked, obj=self._whole)
        return getattr(self._whole, asked)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function after each import of a module of torch, until it returns true."""

    def __init__(self, call):
        self._call, self._is_done = call, False

    def find_spec(self, name, path, target=None):
        if self._is_done or name.partition(".")[0] != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                # Not before all of torch is there: parts of it are made while it is imported.
                if not self._is_done and getattr(sys.modules["torch"], "_is_whole", name == "torch"):
                    sys.modules["torch"]._is_whole = True
                    self._is_done = self._call()

            spec.loader.exec_module = exec_module
        return spec


def _pretend(version):
    torch = sys.modules["torch"]
    torch.version.__version__ = version
    torch.__version__ = torch.torch_version.TorchVersion(version)
    return True


def _find_no_module(path):
    """Find nothing by the path of a hidden module: torch has imported it, and no finder is asked again."""
    resolve = pkgutil.resolve_name

    def resolve_others(name):
        if f"{name}.".startswith(f"{path}."):
            raise ModuleNotFoundError(f"No module named {path!r}", name=path)
        return resolve(name)

    pkgutil.resolve_name = resolve_others


if hidden := os.environ.get("TORCH_LACKS"):
    sys.meta_path.insert(0, _AfterImport(lambda: _hide(hidden)))
    _find_no_module(hidden)
if version := os.environ.get("TORCH_CALLS_ITSELF"):
    sys.meta_path.insert(0, _AfterImport(lambda: _pretend(version)))


def _forbid(path):
    """Refuse imports of a module, and of what is in it, to whoever is not torch, which imports it itself."""
    statement, call = builtins.__import__, importlib.import_module

    def check(names, asker):
        if asker.partition(".")[0] not in ("torch", "functorch"):
            for name in names:
                if f"{name}.".startswith(f"{path}."):
                    raise ImportError(f"{name} is forbidden to {asker}", name=name)

    def checked_statement(name, globals=None, locals=None, fromlist=(), level=0):
        if not level:
            check([name, *(f"{name}.{one}" for one in fromlist or ())], (globals or {}).get("__name__", ""))
        return statement(name, globals, locals, fromlist, level)

    def checked_call(name, package=None):
        check([name], sys._getframe(1).f_globals.get("__name__", ""))
        return call(name, package)

    builtins.__import__, importlib.import_module = checked_statement, checked_call


if forbidden := os.environ.get("TORCH_FORBIDS"):
    _forbid(forbidden)
