"""Makes a program of plain torch from the tapes of a case's ranks.

1. A tape has the calls of one rank and the check that failed (``tape.py``). All ranks must have made the same calls, up
   to their own rank (``_merged``); what follows the failure is left out (:meth:`Program._cut`).
2. :meth:`Program.text` writes calls as lines of ``main``, and the check as the last ones; for a check of numbers, a
   copy of the model that is not sharded takes each step as well (``plain``).
"""

import ast
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Call = dict[str, Any]

#: What a program may need, by a word that it has then.
_PARTS = {
    "batch(": """\
def batch(number, rank, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * number + rank))""",
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
_IMPORTS = {
    "copy.": "import copy", "gc.": "import gc", "tempfile.": "import tempfile",
    "dist.": "import torch.distributed as dist",
    "DTensor": "from torch.distributed.tensor import DTensor", "nn.": "from torch import nn", "torch.": "import torch",
    "TorchDispatchMode": "from torch.utils._python_dispatch import TorchDispatchMode",
    "init_device_mesh": "from torch.distributed.device_mesh import init_device_mesh",
}  # fmt: skip
#: The calls that the plain copy of a model takes as well.
_ALIKE = {"step", "zero_grad", "train", "eval", "requires_grad_", "clip_grad_norm_"}
#: The stages that a program compares with the plain copy, and the kind or name of the call that ends each.
_ENDS = {"output": "forward", "gradient": "backward", "parameter after step": "step"}


class NotReproducible(Exception):
    """Why there is no program, in one line."""


class Program:
    """A program, as calls that can be left out one by one."""

    def __init__(self, tapes: Sequence[dict[str, Any]], case: str, world: int) -> None:
        raised = [tape for tape in tapes if tape["judged"] is not None]
        if not raised:
            raise NotReproducible("no rank raised an error: the case was judged after it")
        # A rank may raise what another one has seen: it knows no more than the text.
        failed = min(raised, key=lambda tape: tape["judged"]["kind"] == "assert")
        self.judged: dict[str, Any] = failed["judged"]
        self.kind = self.judged["kind"]
        if self.kind == "assert" or self.judged.get("form", "first-rank") != "first-rank":
            where = self.judged["where"].rpartition("/")[2]
            raise NotReproducible(f"what {where} compares has no form in plain torch (docs/reproduce.md has the forms)")
        self.case, self.world = case, world
        self.texts: dict[str, str] = failed["sources"]["texts"]
        self._imported = failed["sources"]["imports"]
        self.calls = self._cut(_merged(failed, tapes))
        for one in self.calls:
            if one["kind"] == "refused":
                raise NotReproducible(f"{one['name']}: {one['why']}")

    @property
    def label(self) -> str:
        """What the program says when it fails as its case does."""
        its = self.judged
        if self.kind == "raise":
            return f"{its['error']}: {its['text'].partition(chr(10))[0]}"
        labels = {"counts": f"collectives in {its.get('phase')}", "memory": "bytes held"}
        return "AssertionError: " + labels.get(self.kind, f"{its.get('stage')} of {its.get('name')}")

    def fails_alike(self, output: str) -> bool:
        """Whether a program with this output has failed as the case did."""
        own, other = (re.sub(r"0x[0-9a-f]+|\d+", "N", text) for text in (self.label, output))
        return own in other

    def _cut(self, calls: list[Call]) -> list[Call]:
        """Leave out what follows the failure, and all counts of bytes but that with which the failure compares."""
        before = None
        if self.kind == "memory":
            calls, before = self._until_held(calls)
        elif self.kind == "numbers":
            calls = calls[: self._end_of_numbers(calls)]
        return [one for one in calls if one["kind"] != "held" or one is before]

    def _until_held(self, calls: list[Call]) -> tuple[list[Call], Call]:
        """The calls before the bytes that are too many were counted, and the count with which they are compared."""
        held = self.judged["held"]
        calls = calls[: calls.index(held)]
        before = next(one for one in reversed(calls) if one["kind"] == "held" and one["limit"] is None)
        self.limit = held["limit"] - before["value"]
        # A model that exists before the first count is written down when it is sharded.
        return sorted(calls, key=lambda one: one["kind"] != "make"), before

    def _end_of_numbers(self, calls: Sequence[Call]) -> int:
        """How many calls there are up to the one that ends the stage which diverges."""
        its = self.judged
        end, flag = _ENDS.get(its["stage"]), "compared" if "evaluation" in its["name"] else "graph"
        if end is None or any(one.get("target") == "FullyShardedDataParallel" for one in calls):
            raise NotReproducible(f"no program compares the {its['stage']}, or any numbers of torch.fsdp")
        ends = [n for n, one in enumerate(calls, 1) if end in (one["kind"], one["name"]) and one[flag]]
        ends = [n for n in ends if calls[n - 1]["step"] == its["step"]]
        if not ends:
            raise NotReproducible(f"the {its['stage']} that diverges belongs to no call that was seen")
        return ends[-1]

    def text(self, calls: Sequence[Call]) -> str:
        """The program with these calls alone."""
        lines = [line for call in calls for line in self._lines(call, calls)] + [*self._verdict(calls)]
        body = "".join(f"    {line}\n" for line in lines)
        parts = [part for word, part in _PARTS.items() if re.search(rf"\b{re.escape(word)}", body)]
        sources = "\n".join([f"WORLD = {self.world}", *_needed(self.texts, "\n".join([*parts, body])), *parts])
        text = f"""{sources}

def main(rank, rendezvous):
    dist.init_process_group('gloo', init_method=f'file://{{rendezvous}}', rank=rank, world_size=WORLD)
{body}    dist.destroy_process_group()

if __name__ == '__main__':
    torch.multiprocessing.spawn(main, (tempfile.mktemp(),), nprocs=WORLD)
"""
        lines = [line for word, line in _IMPORTS.items() if re.search(rf"\b{re.escape(word)}", text)]
        kept = {one for one in [*lines, *self._imported] if re.search(rf"\b{re.split(r'[ .]', one)[-1]}\b", text)}
        froms: dict[str, list[str]] = {}
        for one in sorted(kept, key=lambda one: ("torch" in one, one)):
            froms.setdefault(one.rpartition("import ")[0], []).append(one.rpartition("import ")[2])
        imports = "\n".join(f"{start}import {', '.join(names)}" for start, names in froms.items())
        return f'"""{self.case} in plain torch.\n\n{self.label[:200]}\n"""\n{imports}\n\n{text}'

    def _lines(self, call: Call, calls: Sequence[Call]) -> Iterator[str]:
        """What a call is in ``main``, and what the plain copy does then."""
        kind, numbers = call["kind"], self.kind == "numbers"
        if kind == "make":
            yield "torch.manual_seed(0)"
            yield f"{call['root']} = {call['code']}"
            if numbers:
                yield f"plain = copy.deepcopy({call['root']})"
        elif kind == "mesh":
            yield f"{call['assign']} = {call['code']}"
        elif kind == "held":
            yield "before = held()"
        elif kind == "backward":
            forward = next((one for one in calls if one["kind"] == "forward" and one["id"] == call["of"]), None)
            yield from () if forward is None else self._backward(call, forward)
        else:
            line = f"{call['assign']} = {_called(call)}" if call.get("assign") else _called(call)
            yield self._under(call, line)
            if numbers and (line.startswith("optim") or call["name"] in _ALIKE):
                yield re.sub(r"(?<!torch\.)\b(optim\d*)\b", r"plain_\1", _plain(line, "rank"))

    def _backward(self, call: Call, forward: Call) -> Iterator[str]:
        loss = f"{call['loss']}({{}})" if "loss" in call else "{}.square().mean()"
        yield self._under(call, f"{loss.format(forward['assign'])}.backward{_called(call)}")
        if self.kind == "numbers":  # of the mean loss of all ranks
            each = loss.format(_plain(_called(forward), "each"))
            yield f"(sum({each} for each in range(WORLD)) / WORLD).backward()"

    def _under(self, call: Call, line: str) -> str:
        """A line, in the context that it ran in or in one that counts."""
        under, last = call["under"], max((one["step"] for one in self.calls if one["kind"] == "backward"), default=0)
        phase = call["name"] if call["kind"] == "call" else call["kind"]
        if self.kind == "counts" and call["graph"] and call["step"] == last and phase == self.judged["phase"]:
            under = [*under, "Issued()"]
        return f"with {', '.join(under)}: {line}" if under else line

    def _verdict(self, calls: Sequence[Call]) -> Iterator[str]:
        """The check with which the program fails."""
        its, label = self.judged, self.label.removeprefix("AssertionError: ")
        if self.kind == "memory":
            yield "dist.barrier()"
            yield "more = held() - before"
            yield f"assert more <= {self.limit}, f'{label}: {{more}} more than before, not at most {self.limit}'"
        elif self.kind == "counts":
            yield f"expected = { ({key.replace('_', ''): count for key, count in its['expected'].items()}) }"
            yield "alike = {kind: sum(kind in name for name in issued) for kind in expected} == expected"
            yield "alike = alike and len(issued) == sum(expected.values())"
            yield f"assert alike, f'{label}: {{issued}} instead of {{expected}}'"
        elif self.kind == "numbers" and (forwards := [one for one in calls if one["kind"] == "forward"]):
            found, expected = forwards[-1]["assign"], _plain(_called(forwards[-1]), "rank")
            if its["stage"] != "output":
                end = ".grad" if its["stage"] == "gradient" else ".detach()"
                named = f".get_parameter({its['name']!r}){end}"
                found, expected = f"whole({forwards[-1]['target']}{named})", f"plain{named}"
            yield f"check({label!r}, {found}, {expected})"
        elif self.kind in ("same", "form"):
            yield from self._states(label)

    def _states(self, label: str) -> Iterator[str]:
        its, name, place = self.judged, self.judged["name"], int(self.judged["stage"] == "optimizer state")
        sides = [its[key].split("|")[place] for key in ("found", "expected") if key in its]
        for number, side in enumerate(sides):
            made = [one for one in self.calls if one.get("assign") == side.partition("[")[0]]
            if "broadcast_from_rank0=True" in str(made):
                yield f"box{number} = [{side}]  # the first rank's"
                yield f"dist.broadcast_object_list(box{number})"
                sides[number] = f"box{number}[0]"
        parameter, _, key = name.partition(": ")
        if self.kind == "form":  # the first rank alone has what a state dict of the first rank has
            mine = f"{sides[0]}.get('state', {{}})" if place else sides[0]
            yield f"assert not rank or {parameter!r} not in {mine}, {label!r}"
        else:
            end = f"['state'].get({parameter!r}, {{}}).get({key!r})" if place else f".get({name!r})"
            if name.startswith("group "):
                end = f"['param_groups'][{name[6]}].get({key!r})"
            yield f"check({label!r}, whole({sides[0]}{end}), whole({sides[1]}{end}))"


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
    words = [*call["args"], *(f"{key}={value}" for key, value in call["kwargs"].items())]
    return f"{call['target']}({', '.join(words)})"


def _plain(text: str, rank: str) -> str:
    """An expression of the plain copy, on a rank's data."""
    return re.sub(r"\brank\b", rank, re.sub(r"\bmodel\d*\b", "plain", text))


def _needed(texts: dict[str, str], used: str) -> list[str]:
    """The sources that are used, without methods that nothing calls."""
    kept: list[str] = []
    for name, text in reversed(texts.items()):
        if not re.search(rf"\b{name}\b", used):
            continue
        (node,) = ast.parse(text).body
        if isinstance(node, ast.ClassDef):
            if not re.search(r"\bout\d+ = ", used):
                node.body = [one for one in node.body if getattr(one, "name", "") != "forward"]
            called = re.findall(r"\.(\w+)", used + ast.unparse(node))
            called += ["__init__", "forward", "get_extra_state", "set_extra_state"]
            node.body = [one for one in node.body if getattr(one, "name", "__init__") in called] or [ast.Pass()]
        kept.insert(0, re.sub(r"\n\s*\n", "\n", ast.unparse(node)))
        used += kept[0]
    return kept
