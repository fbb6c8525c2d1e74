"""Makes a program of plain torch from the tapes of a case's ranks, and a smaller one for as long as it fails alike.

A tape has the calls of one rank (``harness/watching/tape.py``). In a trial the ranks are forks of this process, which
has imported torch and started no thread.
"""

import ast
import importlib
import itertools
import json
import multiprocessing
import os
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

Call = dict[str, Any]

#: What a program may need, by a word that it has then.
_PARTS = {
    "batch(": """\
def batch(number, rank, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * number + rank))""",
    "tokens(": """\
def tokens(vocabulary, number, rank, *shape):
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(100 * number + rank))""",
    "whole(": """\
def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor""",
    "check(": """\
def check(what, found, expected):
    assert (found is None) == (expected is None), f'{what}: {found} instead of {expected}'
    torch.testing.assert_close(found, expected, msg=lambda text: f'{what}: {text}')""",
    "held()": """\
def held():  # the bytes of all live tensors
    gc.collect()
    found = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and type(one) is not DTensor]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in found}.values())""",
    "Issued()": """\
class Issued(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == 'c10d':
            issued.append(function.__name__.replace('_', ''))
        return function(*args, **(kwargs or {}))
issued = []""",
}
#: What takes the place of a model with ``layers``, if it fails alike.
_STACK = """\
class {name}(nn.Module):
    def __init__({signature}):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range({depth}))
        self.out = nn.Linear(dim, dim)
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x)"""
_IMPORTS = {
    "copy.": "import copy", "gc.": "import gc", "re.sub": "import re", "tempfile.": "import tempfile",
    "dist.": "import torch.distributed as dist",
    "DTensor": "from torch.distributed.tensor import DTensor", "nn.": "from torch import nn", "torch.": "import torch",
    "TorchDispatchMode": "from torch.utils._python_dispatch import TorchDispatchMode",
    "init_device_mesh": "from torch.distributed.device_mesh import init_device_mesh",
}  # fmt: skip
#: What a plain copy of the model does as well.
_ALIKE = {"step", "zero_grad", "train", "eval", "requires_grad_", "to", "double", "clip_grad_norm_"}
#: The calls at whose end a stage is compared, by kind or name.
_ENDS = {"output": "forward", "loss": "forward", "gradient": "backward", "total norm": "clip_grad_norm_",
         "clipped gradient": "clip_grad_norm_"}  # fmt: skip


class NotReproducible(Exception):
    """Why there is no program, in one line."""


class Program:
    """A program, as calls that can be left out one by one."""

    def __init__(self, tapes: Sequence[dict[str, Any]], case: str, world: int) -> None:
        failed = [tape for tape in tapes if tape["judged"] is not None]
        if not failed:
            raise NotReproducible("no rank raised an error: the case was judged after it")
        self.judged: dict[str, Any] = failed[0]["judged"]
        if self.judged["kind"] == "assert" or self.judged.get("form", "first-rank") != "first-rank":
            raise NotReproducible(f"{self.judged['where'].rpartition('/')[2]} asserts what no form of a program has")
        self.case, self.world, self.texts = case, world, dict(failed[0]["sources"]["texts"])
        self._imported = failed[0]["sources"]["imports"]
        calls = self._cut(_merged(failed[0], tapes))
        self.refused = [f"{one['name']}: {one['why']}" for one in calls if one["kind"] == "refused"]
        self.calls = [one for one in calls if one["kind"] != "refused"]

    @property
    def label(self) -> str:
        """What the program says when it fails as its case does."""
        its = self.judged
        if its["kind"] == "raise":
            return f"{its['error']}: {its['text'].partition(chr(10))[0]}"
        labels = {"counts": f"collectives in {its.get('phase')}", "memory": "bytes held"}
        return "AssertionError: " + labels.get(its["kind"], f"{its.get('stage')} of {its.get('name')}")

    def fails_alike(self, output: str) -> bool:
        """Whether a program with this output has failed as the case did."""
        own, other = (re.sub(r"0x[0-9a-f]+|\d+", "N", text) for text in (self.label, output))
        return own in other

    def _cut(self, calls: list[Call]) -> list[Call]:
        """Leave out what follows the failure."""
        its, last = self.judged, len(calls)
        if its["kind"] == "memory":
            last = next(number for number, one in enumerate(calls) if one == its["held"]) + 1
            # What is made before the bytes are counted first is seen when it is sharded.
            return sorted(calls[:last], key=lambda one: one["kind"] != "make")
        if its["kind"] == "numbers":
            compared, end = "evaluation" in its["name"], _ENDS.get(its["stage"], "step")
            ends = [
                number for number, one in enumerate(calls)
                if end in (one["kind"], one["name"]) and one["step"] == its["step"]
                and bool(one.get("compared")) == compared and (compared or not one["under"])
            ]  # fmt: skip
            if not ends:
                raise NotReproducible(f"the {its['stage']} that diverges belongs to no call that was seen")
            last = ends[-1] + 1
        return calls[:last]

    def text(self, calls: Sequence[Call]) -> str:
        """The program with these calls alone."""
        lines, depth = [], 0
        for call in calls:
            for line in self._lines(call, calls):
                depth -= line == "<"
                lines += ["    " * depth + line] * (line != "<")
                depth += line.startswith("with ") and line.endswith(":")
        lines += self._verdict(calls)
        body = "".join(f"    {line}\n" for line in _folded(lines))
        parts = [part for word, part in _PARTS.items() if re.search(rf"\b{re.escape(word)}", body)]
        text = (
            "\n".join([f"WORLD = {self.world}", *_needed(self.texts, "\n".join([*parts, body])), *parts])
            + f"""

def main(rank, rendezvous):
    dist.init_process_group('gloo', init_method=f'file://{{rendezvous}}', rank=rank, world_size=WORLD)
{body}    dist.destroy_process_group()

if __name__ == '__main__':
    torch.multiprocessing.spawn(main, (tempfile.mktemp(),), nprocs=WORLD)
"""
        )
        lines = [line for word, line in _IMPORTS.items() if re.search(rf"\b{re.escape(word)}", text)]
        kept = {one for one in [*lines, *self._imported] if re.search(rf"\b{re.split(r'[ .]', one)[-1]}\b", text)}
        froms: dict[str, list[str]] = {}
        for one in sorted(kept, key=lambda one: ("torch" in one, one)):
            froms.setdefault(one.rpartition(" import ")[0], []).append(one.rpartition("import ")[2])
        imports = "\n".join(f"{start + ' ' * bool(start)}import {', '.join(names)}" for start, names in froms.items())
        return f'"""{self.case} in plain torch.\n\n{self.label[:200]}\n"""\n{imports}\n\n{text}'

    def _lines(self, call: Call, calls: Sequence[Call]) -> Iterator[str]:
        kind, numbers = call["kind"], self.judged["kind"] == "numbers"
        if kind == "make":
            yield f"torch.manual_seed({call['seed']})"
            yield f"{call['root']} = {call['code']}"
            yield from (f"{call['root']}.get_parameter({name!r}).requires_grad_(False)" for name in call["frozen"])
            if numbers:
                yield f"plain = copy.deepcopy({call['root']})"
        elif kind == "mesh":
            yield f"{call['assign']} = {call['code']}"
        elif kind == "held":
            if call is self._before(calls):
                yield "before = held()"
        elif kind == "close":
            yield "<"
        elif kind == "open":
            yield f"with {_called(call)}:"
        elif kind == "backward":
            forward = next((one for one in calls if one["kind"] == "forward" and one["id"] == call["of"]), None)
            if forward is not None:
                yield from self._under(call, f"{_loss(forward)}.backward{_called(call)}")
                if numbers:
                    each = _loss(forward, _plain(_called(forward), "each"))
                    yield f"(sum({each} for each in range(WORLD)) / WORLD).backward()"
        else:
            assign = f"out{call['id']}" if kind == "forward" else call.get("assign", "")
            line = f"{assign} = {_called(call)}" if assign else _called(call)
            yield from self._under(call, line)
            if numbers and (call.get("both") or call["name"] in _ALIKE):
                line = re.sub(
                    r"^norm = model\w*\.clip_grad_norm_\(", "norm = clip_grad_norm_(model.parameters(), ", line
                )
                yield re.sub(r"(?<!torch\.)\b(optim\d*|norm)\b", r"plain_\1", _plain(line, "rank"))

    def _under(self, call: Call, line: str) -> Iterator[str]:
        """A line, in the context that it ran in or in one that counts."""
        its, under = self.judged, call["under"]
        kind = call["kind"] if call["kind"] != "call" else {"clip_grad_norm_": "clip"}.get(call["name"], call["name"])
        last = max((one["step"] for one in self.calls if one["kind"] == "backward"), default=0)
        if its["kind"] == "counts" and not under and kind == its["phase"] and call["step"] == min(its["step"], last):
            under = "Issued()"
        yield f"with {under}: {line}" if under else line

    def _before(self, calls: Sequence[Call]) -> Call | None:
        if self.judged["kind"] != "memory":
            return None
        return next((one for one in reversed(calls) if one["kind"] == "held" and one["limit"] is None), None)

    def _verdict(self, calls: Sequence[Call]) -> Iterator[str]:
        its, label = self.judged, self.label.removeprefix("AssertionError: ")
        if its["kind"] == "memory":
            before = self._before(self.calls)
            assert before is not None
            limit = its["held"]["limit"] - before["value"]
            yield "dist.barrier()"
            yield "more = held() - before"
            yield f"assert more <= {limit}, f'{label}: {{more}} more than before, instead of at most {limit}'"
        elif its["kind"] == "counts":
            yield f"expected = { ({key.replace('_', ''): count for key, count in its['expected'].items()}) }"
            yield "alike = {kind: sum(kind in name for name in issued) for kind in expected} == expected"
            yield "alike = alike and len(issued) == sum(expected.values())"
            yield f"assert alike, f'{label}: {{issued}} instead of {{expected}}'"
        elif its["kind"] == "numbers":
            yield from self._compared(calls, label)
        elif its["kind"] in ("held", "same", "form"):
            yield from self._states(label)

    def _compared(self, calls: Sequence[Call], label: str) -> Iterator[str]:
        stage, name = self.judged["stage"], self.judged["name"]
        forward = next((one for one in reversed(calls) if one["kind"] == "forward"), None)
        root = next((one["root"] for one in calls if one["kind"] == "make"), None)
        if forward is None or root is None:
            return  # of a smaller program, which passes
        if stage in ("output", "loss"):
            its = _plain(_called(forward), "rank")
            mine, its = (f"out{forward['id']}", its) if stage == "output" else (_loss(forward), _loss(forward, its))
            yield f"check({label!r}, {mine}, {its})"
        elif stage == "total norm":
            yield f"check({label!r}, whole(norm), plain_norm)"
        else:
            end = ".detach()" if stage.startswith("parameter") else ".grad"
            its = f"plain.get_parameter({name!r}){end}"
            if any(one.get("target") == "FullyShardedDataParallel" for one in calls):
                yield f"with FullyShardedDataParallel.summon_full_params({root}, with_grads={end == '.grad'}):"
                yield f"    found = {root}.named_parameters()"
                yield "    found = {re.sub('_fsdp_wrapped_module.', '', name): one for name, one in found}"
                yield f"    check({label!r}, found[{name!r}]{end}, {its})"
            else:
                yield f"check({label!r}, whole({root}.get_parameter({name!r}){end}), {its})"

    def _states(self, label: str) -> Iterator[str]:
        its, name, place = self.judged, self.judged["name"], int(self.judged["stage"] == "optimizer state")
        sides = [its[key].split("|")[place] for key in ("found", "state", "expected") if key in its]
        for number, side in enumerate(sides):
            made = [one for one in self.calls if one.get("assign") == side.partition("[")[0]]
            if "broadcast_from_rank0=True" in str(made):
                yield f"box{number} = [{side}]  # the first rank's"
                yield f"dist.broadcast_object_list(box{number})"
                sides[number] = f"box{number}[0]"
        parameter, _, key = name.partition(": ")
        if its["kind"] == "form":  # the first rank alone has what a state dict of the first rank has
            mine = f"{sides[0]}.get('state', {{}})" if place else sides[0]
            yield f"assert not rank or {parameter!r} not in {mine}, {label!r}"
            return
        if name.startswith("group "):
            yield f"groups = [side['param_groups'][{name[6]}] for side in ({', '.join(sides)})]"
            yield f"found, expected = (group.get({key!r}) for group in groups)"
            yield f"assert found == expected, f'{label}: {{found}} instead of {{expected}}'"
            return
        end = f"['state'].get({parameter!r}, {{}}).get({key!r})" if place else f".get({name!r})"
        sides = [side + end for side in sides]
        if its["kind"] == "held":
            mine = f"{its['run'][0]}.get_parameter({parameter!r})"
            sides.insert(0, f"{its['run'][1]}.state[{mine}].get({key!r})" if place else f"{mine}.detach()")
        yield f"check({label!r}, whole({sides[0]}), whole({sides[1]}))"


def _merged(mine: Mapping[str, Any], tapes: Sequence[Mapping[str, Any]]) -> list[Call]:
    """The calls of a rank, if all ranks make the same on data by their numbers; a rank that was killed has no tape."""
    texts = [[_own(one | {"value": 0}, tape) for one in tape["calls"]] for tape in tapes]
    for calls in itertools.zip_longest(*texts):
        if len({one for one in calls if one is not None}) > 1 or "§" in calls[0]:
            raise NotReproducible(f"ranks make different calls: {json.loads(calls[0])['name']}")
    found: list[Call] = json.loads(_own(mine["calls"], mine))
    return found


def _own(value: Any, tape: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False).replace(f"§{tape['rank']}§", "rank")


def _called(call: Call) -> str:
    return (
        f"{call['target']}({', '.join([*call['args'], *(f'{key}={value}' for key, value in call['kwargs'].items())])})"
    )


def _plain(text: str, rank: str) -> str:
    """An expression of the plain copy, on a rank's data."""
    return re.sub(r"\brank\b", rank, re.sub(r"\bmodel\d*\b", "plain", text))


def _loss(forward: Call, output: str = "") -> str:
    output = output or f"out{forward['id']}"
    return f"{forward['loss']}({output})" if forward.get("loss") else f"{output}.square().mean()"


def _needed(texts: dict[str, str], used: str) -> list[str]:
    """The sources that are used, without methods that nothing calls."""
    kept: list[str] = []
    if not re.search(r"\bout\d+ = ", used):
        forward = re.compile(r"\n    def forward\(.*?(?=\n    def |\Z)", flags=re.DOTALL)
        texts = {name: re.sub(r":$", ": pass", forward.sub("", text).rstrip()) for name, text in texts.items()}
    for name, text in reversed(texts.items()):
        if not re.search(rf"\b{name}\b", used):
            continue
        (node,) = ast.parse(text).body
        if isinstance(node, ast.ClassDef):
            own = ["forward", "step", "reset_parameters", "get_extra_state", "set_extra_state"]
            node.body = [
                one for one in node.body if not isinstance(one, ast.FunctionDef) or one.name in own
                or one.name.startswith("__") or re.search(rf"\.{one.name}\b", used + str(texts))
            ] or [ast.Pass()]  # fmt: skip
        kept.insert(0, re.sub(r"\n\s*\n", "\n", ast.unparse(node)))
        used += kept[0]
    return kept


def _folded(lines: list[str]) -> list[str]:
    """Lines that differ by one index, as a loop."""
    folded: list[str] = []
    while lines:
        template = re.sub(r"\[\d\]", "[index]", line := lines.pop(0))
        places = list(dict.fromkeys(re.findall(r"\[(\d)\]", line)))
        alike = len(places) == 1
        while alike and lines and re.sub(r"\[\d\]", "[index]", lines[0]) == template:
            places += re.findall(r"\[(\d)\]", lines.pop(0))[:1]
        folded.append(line if len(places) < 2 or not alike else f"for index in ({', '.join(places)}): {template}")
    return folded


# Trials, and what they leave out.


def control(text: str) -> str:
    """The program with the reference implementation in place of torch's, which it passes."""
    for place in ("torch.distributed.fsdp", "torch.nn.utils"):
        text = text.replace(f"from {place} import", "from fsdp_impl import")
    return text


def tried(text: str, world: int, seconds: float = 60.0) -> str:
    """Run the ranks of a program; what they print, empty if all pass."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, f"rank{rank}") for rank in range(world)]
        ranks = [context.Process(target=_rank, args=(text, rank, folder, path)) for rank, path in enumerate(paths)]
        for one in ranks:
            one.start()
        end = time.monotonic() + seconds
        while (left := [one for one in ranks if one.is_alive()]) and time.monotonic() < end:
            wait([one.sentinel for one in left], max(0.0, end - time.monotonic()))
            if any(one.exitcode for one in ranks):
                end = min(end, time.monotonic() + 1)  # peers may wait for it
        for one in ranks:
            one.kill()
            one.join()
        failed = [path for path, one in zip(paths, ranks, strict=True) if one.exitcode and os.path.exists(path)]
        return "\n".join(open(path).read() for path in failed) + "." * bool(failed)


def _rank(text: str, rank: int, folder: str, path: str) -> None:
    with open(path, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            values: dict[str, Any] = {"__name__": "program"}
            exec(compile(text, "program.py", "exec"), values)
            values["main"](rank, os.path.join(folder, "rendezvous"))
        except BaseException:
            traceback.print_exc(file=file)
            file.flush()
            os._exit(1)
    os._exit(0)


class Shrinking:
    """Leaves out what the failure does not need."""

    def __init__(self, program: Program, *, until: float) -> None:
        import torch  # and, once for all trials, what ranks would import

        torch.set_num_threads(1)
        for name in ("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "fsdp_impl"):
            importlib.import_module(name)
        torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()
        self.program, self._until, self.trials, self.calls = program, until, 0, program.calls
        began = time.monotonic()
        self.said = tried(program.text(self.calls), program.world)
        self.holds = program.fails_alike(self.said)
        self._limit = 5 + 4 * (time.monotonic() - began)  # of a smaller program, which may hang
        self.has_control = self.holds and tried(control(program.text(self.calls)), program.world) == ""

    def run(self) -> str:
        """Return the program that is left."""
        program = self.program
        # Where nothing tells a right program from a wrong one, only what cannot make it wrong goes.
        careful = program.judged["kind"] != "raise" and not self.has_control
        bound = {"make", "mesh", "held", "state_dict"} | ({"fully_shard", "__init__"} if careful else set())

        def without(left: Iterable[Call]) -> bool:
            gone = {id(one) for one in left if one["name"] not in ("mesh", "held")}
            return self._keep([one for one in self.calls if id(one) not in gone])

        def with_each(change: Callable[[Call], Call]) -> bool:
            return self._keep([one | change(one) for one in self.calls])

        for root in [one["root"] for one in self.calls if one["kind"] == "make"]:
            without(one for one in self.calls if re.search(rf"\b{root}\b", str([*one.values()])))
        if careful and program.judged["kind"] in ("numbers", "counts", "memory"):
            return program.text(self.calls)
        world, program.world = program.world, min(program.world, 2)
        if not with_each(
            lambda one: {"code": one["code"].replace(f"({world},)", "(2,)")} if one["kind"] == "mesh" else {}
        ):
            program.world = world
        # One group of all parameters, all of them trainable.
        group = re.compile(r"^\[\{.*?\b(model\d*)\..*")
        with_each(
            lambda one: {"args": [group.sub(r"\1.parameters()", arg) for arg in one["args"]]} if "both" in one else {}
        )
        with_each(lambda one: {"frozen": []} if one["kind"] == "make" else {})
        for name, text in [*program.texts.items()]:
            if (found := re.search(r"def __init__\((self, dim[^)]*)\)", text)) and "self.layers = " in text:
                depth = "depth" if "depth" in found[1] else "3"
                program.texts[name] = _STACK.format(name=name, signature=found[1], depth=depth)
                if not self._keep(self.calls):
                    program.texts[name] = text
        setting = bound | {"fully_shard", "__init__"}
        for step in sorted({one["step"] for one in self.calls}):
            without(one for one in self.calls if one["step"] == step and one["name"] not in setting)
        for name in sorted({one["name"] for one in self.calls}):
            if not any(word in name for word in bound):
                without(one for one in self.calls if one["name"] == name)
        for layers in (1, 2) if "depth" in str(program.texts) else ():
            part = re.compile(rf"\.layers\[[{layers}-9]\]")
            fewer = [one for one in self.calls if not part.search(str([*one.values()]))]
            end = f", depth={layers})"
            made = [
                one | {"code": (one["code"][:-1] + end).replace("(, ", "(")} if "code" in one and "root" in one else one
                for one in fewer
            ]
            if self._keep(made):
                break
        for call in reversed(self.calls):
            if call["kind"] not in ("open", "close") and not any(word in call["name"] for word in bound):
                without([call])
        for key in sorted({key for one in self.calls for key in one.get("kwargs", ())}):
            kept = [{k: v for k, v in one.get("kwargs", {}).items() if k != key} for one in self.calls]
            self._keep([one | {"kwargs": left} for one, left in zip(self.calls, kept, strict=True)])
        return program.text(self.calls)

    def _keep(self, calls: list[Call]) -> bool:
        """Take over fewer calls if the program still fails alike, and the reference passes it if it did."""
        if time.monotonic() > self._until:
            return False
        self.trials += 1
        text, world = self.program.text(calls), self.program.world
        if not self.program.fails_alike(tried(text, world, self._limit)):
            return False
        if self.program.judged["kind"] != "raise" and self.has_control and tried(control(text), world, self._limit):
            return False
        self.calls = calls
        return True
