"""Each check of the doctor on records that are made by hand: nothing is found in a healthy step, one change is."""

import dataclasses
import math
import re

import pytest
import torch

from shardproof.harness.collectives.trace import Collective, Trace
from shardproof.harness.judging import codes
from shardproof.harness.tensors.fingerprints import Box, digest, on_host
from shardproof.harness.training import acts, buffers, freezing, invariants, norms, recomputing, sharded, updates
from shardproof.harness.training.evidence import Evidence, Start, holders_of
from shardproof.harness.training.examination import Examination
from shardproof.harness.training.reduction import Reduced, check_reduction
from shardproof.harness.training.tokens import check_tokens
from shardproof.harness.watching.records import (
    Drop,
    ForwardRecord,
    Gradient,
    Groups,
    Idle,
    Inputs,
    LossRecord,
    Narrow,
    NormCall,
    NormRecord,
    NotFinite,
    Optimizer,
    Parameter,
    Reducers,
    StepRecord,
)
from shardproof.harness.watching.sharding import Sharding
from shardproof.harness.watching.ties import Built

SHAPES = {"w": (8, 3), "b": (5,)}
EVERY = range(4)
OUTPUT = NotFinite(0, "output of '0'")


def gradient(tensor, box=None, pending=()):
    return Gradient(box or Box(tuple(tensor.shape)), pending, on_host([digest(tensor, box)])[0], "float32")


def forwards(*batches, after=None):
    """Forwards of these batches, each of which a backward follows, or after so many backwards."""
    after = range(len(batches)) if after is None else after
    return ForwardRecord(len(batches), [Inputs(one, 8, count) for one, count in zip(batches, after, strict=True)])


def put(records, **changes):
    for record in records:
        for field, value in changes.items():
            setattr(record, field, value)


class Made:
    """One step of four ranks on a mesh of 2 x 2: the mean of two microbatches each, halved by clipping.

    Parameters are replicated, or their rows sharded over the second dimension, over which ranks may read the same data.
    """

    def __init__(self, *, sharded=True, tensors_over=""):
        torch.manual_seed(0)
        self.sharded = sharded
        names, data = ("replicate", tensors_over or "shard"), ("replicate", "shard")[: 1 if tensors_over else 2]
        parts = [[{n: torch.randn(s).double() for n, s in SHAPES.items()} for _ in range(2)] for _ in EVERY]
        readers = [rank // 2 if tensors_over else rank for rank in EVERY]
        self.parts = [parts[reader] for reader in readers]
        self.records = [StepRecord(n, 0, 2, forwards(reader, reader + 10)) for n, reader in enumerate(readers)]
        self.starts, self.memory = [], {number: [0] * 4 for number in range(3)}
        for rank, record in enumerate(self.records):
            members = {names[0]: (rank % 2, rank % 2 + 2), names[1]: (rank // 2 * 2, rank // 2 * 2 + 1)}
            bits = {name: (self.box(name, rank), tuple(EVERY), (rank % 2 if self.sharded else 0,)) for name in SHAPES}
            groups = Groups(members, "mesh", data)
            self.starts.append(Start(groups, bits, (), "Net", SHAPES, {}, buffers={"load": (0,)}))
            record.gradients.own = {n: [(m, gradient(self.parts[rank][m][n])) for m in range(2)] for n in SHAPES}
            record.parameters = {name: self.parameter(name, rank) for name in SHAPES}
            record.optimizers = [Optimizer("AdamW", 2, 2, False)]
            record.modules.ties = [("head", "w")]
            record.modules.buffers = {"load": (1,)}
            record.collectives = Trace([Collective("forward", "all_reduce", "float32", 8, tuple(EVERY))])
        self.clip(self.norm())
        self.reduce(self.mean)

    def rows(self, name, rank):
        return ((0, 4), (4, 8))[rank % 2] if name == "w" else ((0, 3), (3, 5))[rank % 2]

    def box(self, name, rank):
        dims = ((self.rows(name, rank),), *(((0, size),) for size in SHAPES[name][1:]))
        return Box(SHAPES[name], dims if self.sharded else None)

    def parameter(self, name, rank):
        bits, box = (rank % 2 if self.sharded else 0,), self.box(name, rank)
        return Parameter(box, tuple(EVERY), True, "float32", 0, 0.1, before=bits, after=(*bits, 2), state={"m": bits})

    def sum(self, name, ranks=EVERY, microbatches=(0, 1)):
        return sum(self.parts[rank][number][name] for rank in ranks for number in microbatches)

    def mean(self, name, rank):
        return self.sum(name) / 4

    def at_step(self, rank, name, factor):
        local = self.mean(name, rank)[slice(*self.rows(name, rank))] / 2
        self.gradients[rank].at_step[name] = gradient(local * factor, self.box(name, rank))

    def clip(self, norm):
        self.put_all(norms=NormRecord([NormCall("clip_grads_with_norm_", norm, 1.0, 2.0)]))

    def norm(self):
        return math.sqrt(sum(float(self.sum(name).square().sum()) for name in SHAPES)) / 4

    def local_norm(self, rank):
        return math.sqrt(sum(one.fingerprint.squares for one in self.gradients[rank].after_backward.values()))

    def reduce(self, full, scale=lambda rank: 0.5, names=tuple(SHAPES)):
        """Set the reduced gradients: the full ones as ``full`` makes them on each rank, and the scale of clipping."""
        for rank, mine in enumerate(self.gradients):
            for name in names:
                tensor, box = full(name, rank), self.box(name, rank)
                tensor = tensor[slice(*self.rows(name, rank))] if self.sharded else tensor
                mine.after_backward[name] = gradient(tensor, box)
                mine.at_step[name] = gradient(tensor * scale(rank), box)

    def put(self, name, ranks=EVERY, **changes):
        for rank in ranks:
            parameters = self.records[rank].parameters
            parameters[name] = dataclasses.replace(parameters[name], **changes)

    def wrap(self, *wrappers):
        self.starts = [dataclasses.replace(one, reducers=Reducers(wrappers)) for one in self.starts]

    def shard(self, had, *, is_kept=True, count=16):
        """Have ranks have had full parameters: bits, whether of one value, and writes by rank and name."""
        self.starts = [dataclasses.replace(one, built=Built(sharded={
            name: Sharding((bits,), count, is_constant, writes, is_kept if rank else True)
            for name in SHAPES for bits, is_constant, writes in [had(rank, name)]
        })) for rank, one in enumerate(self.starts)]  # fmt: skip

    def copy(self, names, *, copied=""):
        """Have ranks hold parts of 32 elements, of equal bits; of all but one parameter, of other bits."""
        for rank, record in enumerate(self.records):
            begin = rank % 2 * 32
            for name in names:
                box, bits = Box((64,), (((begin, begin + 32),),)), (begin if copied and name != copied else 7,)
                record.parameters[name] = dataclasses.replace(record.parameters[name], box=box, before=bits)
                self.starts[rank].bits[name] = box, tuple(EVERY), bits
            self.starts[rank] = dataclasses.replace(self.starts[rank], varied=dict.fromkeys(names, "cuda"))

    def seed(self, seeds):
        self.starts = [dataclasses.replace(one, seed=seed) for one, seed in zip(self.starts, [*seeds, 3], strict=True)]

    def silence(self, rank, tokens):
        for one, record in enumerate(self.records):
            record.losses = LossRecord(tokens if one == rank else [(8, 0.25)])
        self.gradients[rank].own = {name: [(0, gradient(torch.zeros(SHAPES[name])))] for name in SHAPES}

    def read_as_1(self):
        """Rank 3 reads what rank 1 reads."""
        self.records[3].forwards = self.records[1].forwards

    def lose(self, name):
        """No rank has a gradient of a parameter."""
        for mine in self.gradients:
            del mine.own[name], mine.at_step[name]

    def never_reduced(self):
        """The gradients of ranks that a wrapper should keep alike are their own."""
        self.reduce(lambda name, rank: self.sum(name, [rank]), lambda rank: 1.0)
        for name in SHAPES:
            self.put(name, before=(1,), after=(1,))
        self.wrap("DistributedDataParallel")

    @property
    def gradients(self):
        return [record.gradients for record in self.records]

    @property
    def modules(self):
        return [record.modules for record in self.records]

    @property
    def acts(self):
        return [record.modules.acts for record in self.records]

    def put_all(self, **changes):
        put(self.records, **changes)

    def evidence(self):
        return Evidence(self.records, self.starts, holders_of(self.starts)[0])


CHECKS = {
    name: lambda made, name=name, room=room: getattr(room, f"check_{name}")(made.evidence())
    for room, names in (
        (invariants, ("replicas", "data", "contributions", "collectives", "finite")),
        (norms, ("norm",)),
        (updates, ("optimizers", "updates")),
    )
    for name in names
}
CHECKS |= {
    "tokens": lambda made: check_tokens(made.evidence()),
    "mixed": lambda made: sharded.check_mixed(made.starts),
    "recomputed": lambda made: recomputing.check_recomputed(made.evidence()),
    "copied": lambda made: sharded.check_copied(made.evidence()),
    "acts": lambda made: acts.check_acts(made.evidence()),
    "start": lambda made: invariants.check_start(made.starts, holders_of(made.starts)[1]),
    "ever": lambda made: invariants.check_gradients_ever([made.evidence()]),
    "optimizers_ever": lambda made: updates.check_optimizers_ever([made.evidence()]),
    "states": lambda made: invariants.check_states_ever([made.evidence()]),
    "ties": lambda made: invariants.check_ties(made.evidence(), [("w", "head")]),
    "limit": lambda made: norms.check_limit([made.evidence()] * 2),
    "reduction": lambda made: check_reduction(made.evidence(), [])[0],
    "gathered": lambda made: invariants.check_gathered(made.evidence()),
    "rates_ever": lambda made: updates.check_rates_ever([made.evidence()]),
    "buffers_ever": lambda made: buffers.check_buffers_ever([made.evidence()]),
    "moments_ever": lambda made: updates.check_moments_ever([made.evidence()]),
    "frozen_ever": lambda made: freezing.check_frozen_ever([made.evidence()]),
    "gathered_ever": lambda made: invariants.check_gathered_ever([made.evidence()]),
    "memory": lambda made: invariants.check_memory(made.memory),
}


def render(made, check):
    return [one.render() for one in CHECKS[check](made)]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "replicated"])
def test_nothing_is_found_in_a_healthy_step(check, sharded):
    assert render(Made(sharded=sharded), check) == []
    assert render(Made(sharded=sharded, tensors_over="tp"), check) == []


#: The check, the change, and what is found, line by line: "~" is a number that depends on the gradients, "..." advice.
FOUND = {
    "D1-start": ("start", lambda m: m.starts[2].bits.update(w=(m.box("w", 2), tuple(EVERY), (9,))),
        "step 0: replicas differ when training begins [D1, S9]|'w': ranks 0, 2 hold the same elements and have "
        "different values|give each the values of one rank: broadcast them, or build and load the model alike on each"),
    "D1-seeds": ("start", lambda m: (m.starts[2].bits.update(w=(m.box("w", 2), tuple(EVERY), (9,))), m.seed([3, 3, 4])),
        "step 0: replicas differ when training begins [D1, S9]|...|seen: the seeds of these ranks differ (3, 4)|give "
        "each the values of one rank: ..."),
    "D1": ("replicas", lambda m: m.put("w", [2], after=(9,)), "step 0: replicas differ after the step [D1, S9]|"
        "parameter 'w': ranks 0, 2 (replicate) hold the same elements and differ after the step|from equal gradients "
        "and optimizer states: another learning rate, or a write to it after the step before"),
    "D1-state": ("replicas", lambda m: (m.put("w", [2], after=(9,), state={"exp_avg": (9,)})), "step 0: replicas "
        "differ after the step [D1, S9]|parameter 'w': ranks 0, 2 (replicate) hold the same elements and differ ...|"
        "seen: their gradients are equal, and their optimizer states differ, as where one rank alone loads them: ..."),
    "D1-stateless": ("replicas", lambda m: (m.put("w", [2], after=(9,), state={})), "step 0: replicas differ after the "
        "step [D1, S9]|parameter 'w': ranks 0, 2 (replicate) hold the same elements and differ after the step"),
    "D1-some": ("replicas", lambda m: (m.put("w", [2, 3], after=(9,)), m.put("b", [3], after=(9,))), "step 0: replicas "
        "differ after the step [D1, S9]|parameter 'w', 'b': ranks 0, 2 and ranks 1, 3 (replicate) hold the same ..."),
    "D2": ("replicas", lambda m: (m.at_step(2, "w", 2), m.put("w", [2], after=(9,))),
        "step 0: replicas differ [D2, S9]|gradient of 'w': ranks 0, 2 (replicate) hold the same elements and have "
        "different bits (relative distance 1; 1 of 2 parameters)|they are 1, 2 x "
        "those of rank 0: each rank scales them by itself|the parameters drift apart: after the step 1 differ [D1]"),
    "D2-alone-replicated": ("replicas", lambda m: m.never_reduced(), "step 0: replicas differ [D2, S9]|gradient of "
        "'w', 'b': ...|each rank has its own gradients: nothing has reduced them over these ranks|"
        "DistributedDataParallel reduces what required a gradient when it was made: unfreeze before that"),
    "D2-still": ("replicas", lambda m: (m.at_step(2, "w", 2), m.put("w", before=(1,), after=(1,))),
        "step 0: replicas differ [D2, S9]|gradient of 'w': ranks 0, 2 (replicate) ...|they are 1, 2 x those of rank 0: "
        "..."),
    "D2-noise": ("replicas", lambda m: (m.at_step(2, "w", 1 + 3e-7), m.put("w", [2], after=(9,))),
        "note: step 0: replicas differ [D2, S9]|gradient of 'w': ranks 0, 2 (replicate) ... (relative distance ~; "
        "1 of 2 parameters)|the difference is no more than ...|the parameters drift apart: after the step 1 differ "
        "[D1]"),
    "D2-none": ("replicas", lambda m: (m.gradients[3].at_step.pop("b"), m.put("b", [3], after=(9,))),
        "step 0: replicas differ: some have no gradient [D2, S9]|'b': ranks 1, 3 hold the same elements, and rank 3 "
        "has no gradient"),
    "D1-rate": ("replicas", lambda m: (m.put("w", [2], after=(9,), lr=0.01)), "step 0: replicas differ after the step "
        "[D1, S9]|parameter 'w': ranks 0, 2 (replicate) ...|the learning rate is 0.1, 0.01 on ranks 0, 2: a scheduler "
        "that steps by a rank's own metric or count needs that of all ranks"),
    "D3": ("states", lambda m: (m.put("b", before=(1,), after=(1,)), m.put("b", [1], state={"exp_avg": (9,)})),
        "step 0: optimizer states of replicas differ [D3, S9]|state of 'b': ranks 1, 3 (replicate) hold the same "
        "elements and have different states"),
    "D4-dead": ("optimizers", lambda m: m.put_all(optimizers=[Optimizer("AdamW", 2, 0, True)]),
        "step 0: the optimizer holds dead parameters [D4, S7]|none of the 2 parameters of AdamW is the model's ..."),
    "D4-left": ("optimizers_ever", lambda m: m.put("b", optimizer=None),
        "step 0: parameters are in no optimizer [D4, S7]|'b': 1 of 2 parameters that require a gradient are in no ..."),
    "D4-rests": ("optimizers_ever", lambda m: m.put("b", optimizer=None, resting="SGD"),
        "note: step 0: an optimizer does not step in the watched steps [D4, S7]|'b': 1 of 2 parameters that require a "
        "gradient are in SGD, which does not step in the watched steps 0|meant, as where optimizers take turns, or one "
        "begins later? then watch a step of it with --steps; else it is never called"),
    "D5": ("ever", lambda m: m.lose("b"),
        "step 0: parameters get no gradient [D5, S10]|'b' gets no gradient on any rank in the step|seen: the forward "
        "of their modules runs with gradients enabled: its output is detached or unused afterwards, or goes through "
        "a collective without a gradient (all_reduce was seen)"),
    "D5-disabled": ("ever", lambda m: (m.lose("b"), put(m.modules, detached=["b"])),
        "step 0: parameters get no gradient [D5, S10]|'b' gets no gradient on any rank in the "
        "step|seen: the forward of their modules runs with gradients disabled: under no_grad(), or in a reentrant "
        "checkpoint of inputs that require none"),
    "D5-compiled": ("ever", lambda m: (m.lose("b"), put(m.modules, compiled=["b"])),
        "step 0: parameters get no gradient [D5, S10]|'b' gets no gradient on any rank in the "
        "step"),
    "D5-idle": ("ever", lambda m: (m.lose("b"), put(m.modules, idle=["b"])),
        "note: step 0: modules have no turn [D5, S10]|'b': no forward on any rank calls the "
        "module in the step|meant, as where layers or experts are drawn at random, or a part is unused? else ..."),
    "D5-silent": ("contributions", lambda m: m.gradients[2].own.update(b=[(0, gradient(torch.zeros(5)))], w=[]),
        "step 0: a rank contributes nothing [D5, S10]|each gradient that rank 2 computes is zero, and others' are not"),
    "D5-silent-ignored": ("contributions", lambda m: m.silence(2, [(0, 0.25)]), "step 0: a rank contributes nothing "
        "[D5, S10]|...|seen: no label of their cross_entropy counts: each is ignore_index"),
    "D5-silent-zero": ("contributions", lambda m: m.silence(2, [(8, 0.0)]), "step 0: a rank contributes nothing "
        "[D5, S10]|...|seen: their cross_entropy has labels that count, and the loss multiplies it by zero"),
    "D6": ("updates", lambda m: m.put("w", before=(1,), after=(1,), dtype="bfloat16"), "step 0: parameters do not move "
        "[D6, S7]|'w': the gradient is not zero, and no bit changes in the step|in bfloat16 ..."),
    "D6-lost": ("updates", lambda m: m.put("w", before=(1,), after=(1,), largest=4.0, dtype="bfloat16", lr=1e-3),
        "note: step 0: updates are lost to rounding [D6, S13]|'w': the gradient is not zero, and ...|meant, as at the "
        "start of a warm-up? else keep parameters in float32, or round stochastically"),
    "D6-partly": ("updates", lambda m: (
        m.put("w", dtype="bfloat16", narrow=Narrow(3, 4)), m.put("b", narrow=Narrow(1, 2))),
        "note: step 0: updates are lost to rounding [D6, S13]|'w': the update of 75% of the elements is below half of "
        "the spacing of bfloat16 at their values, so the step does not change them (of elements with a gradient, from "
        "a sample)|meant, as at the start of a warm-up, or where the optimizer rounds stochastically or compensates? "
        "else keep parameters in float32, or round stochastically"),
    "D6-moments": ("moments_ever", lambda m: m.put(
        "w", narrow=Narrow(states=dict.fromkeys(["exp_avg", "exp_avg_sq"], "bfloat16")),
        settings={"betas": (0.9, 0.999)}),
        "note: step 0: moments are lost to rounding [D6, S13]|'exp_avg_sq' of 'w': a step lowers it by at most 1 - "
        "0.999 = 0.001 of its value, below half of the spacing of bfloat16 (0.002 of it at least), so it never falls|"
        "meant, as where the optimizer rounds stochastically? else keep states in float32, or lower beta"),
    "D6-rate": ("updates", lambda m: [m.put(n, before=(1,), after=(1,), largest=4.0, lr=1e-9) for n in SHAPES],
        "note: step 0: updates are lost to rounding [D6, S13]|'w', 'b': ...|... else the learning rate is too small"),
    "D6-large": ("updates", lambda m: m.put("w", before=(1,), after=(1,), largest=4.0),
        "step 0: parameters do not move [D6, S7]|'w': the gradient is not zero, and no bit changes in the step"),
    "D6-zero": ("rates_ever", lambda m: m.put("b", before=(1,), after=(1,), lr=0.0),
        "note: step 0: a learning rate is 0 [D6, S7]|'b': 1 of 2 parameters that optimizers step have a learning rate "
        "of 0 in the watched steps 0, and others one above 0|meant, as where a part is frozen or warms up later? ..."),
    "D7": ("updates", lambda m: m.put("b", state={}, before=(1,), after=(1,), lr=0.0),
        "step 0: parameters have no optimizer state [D7, S7]|"
        "'b': other parameters of the same optimizer have state"),
    "D8": ("ties", lambda m: put(m.modules, ties=[]) or m.records[0].parameters.update(head=m.parameter("w", 0)),
        "step 0: tied parameters are no longer tied [D8, S8]|'w' and 'head' were one parameter and are 2|..."),
    "D8-meant": ("ties", lambda m: (put(m.modules, ties=[("head", "w")]), setattr(m, "starts", [
        dataclasses.replace(one, ties=(("b", "w"),)) for one in m.starts])),
        "note: step 0: parameters were tied and are not [D8, S8]|'b' and 'w' were one parameter and are 2|meant, as "
        "where user code unties them? else each gets a part of the gradient: tie them again"),
    "D9": ("data", lambda m: (m.read_as_1(), put(m.gradients[3:], own=m.gradients[1].own)),
        "step 0: ranks read the same data [D9, S11]|"
        "the 2 ranks of replicate and shard (ranks 1, 3) read the same data in the step|..."),
    "D9-apart": ("data", lambda m: m.read_as_1(), "note: step 0: ranks read the same data "
        "[D9, S11]|the 2 ranks of replicate and shard (ranks 1, 3) read the same data in the step|...|their gradients "
        "differ: meant, as where each rank draws its own actions, noise or labels for the same inputs? then leave it"),
    "D9-dropout": ("data", lambda m: (m.read_as_1(), put(m.modules[3:], has_dropout=True)), "step 0: "
        "ranks read the same data [D9, S11]|the 2 ranks ...|...|their gradients differ by dropout"),
    "D9-twice": ("data", lambda m: (put(m.records[3:], forwards=forwards(3, 3)), m.gradients[3].own.clear()),
        "step 0: a microbatch is read twice [D9, S11]|rank 3 read one of 2 microbatches 2 times in the step"),
    "D9-losses": ("data", lambda m: [setattr(one, "forwards", forwards(n, n)) for n, one in enumerate(m.records)],
        "note: step 0: a microbatch is read twice [D9, S11]|ranks 0-3 read one of 2 microbatches 2 times in the step|"
        "its gradients differ: meant, as where a batch has several losses or dropout? else the sampler repeats it"),
    "D10-scale": ("norm", lambda m: m.reduce(m.mean, lambda rank: 1 / m.local_norm(rank)), "step 0: ranks scale "
        "gradients differently [D10, S6]|each rank scales its gradients by the norm of its own shards, ~ on rank "
        "0; the norm of all gradients is ~|the scale differs between ranks: ~, ~, ~, ~ on ranks 0-3|..."),
    "D10-twice": ("norm", lambda m: m.clip(math.sqrt(2) * m.norm()), "step 0: the norm is not the norm of all "
        "gradients [D10, S6]|...|it is 1.414 times that: elements that several ranks hold are counted on each"),
    "D10-limit": ("limit", lambda m: m.reduce(m.mean, lambda rank: math.sqrt(0.5) / m.norm()), "step 0: the norm is "
        "not the norm of all gradients [D10, S6]|gradients are clipped to a norm of 0.7071, which is 1 / sqrt(2)|seen: "
        "the 2 ranks of replicate hold the same elements: the norm must count these once"),
    "D10-unscaled": ("norm", lambda m: setattr(m.records[0].norms, "clipped_scaled", True),
        "step 0: gradients are clipped while they are scaled [D10, S6]|..."),
    "D11-lost": ("reduction", lambda m: [(one.at_step.pop("w"), one.after_backward.pop("w")) for one in m.gradients],
        "step 0: gradients are not reduced [D11, S2]|'w': ranks computed gradients, and no .grad has one when the "
        "optimizer steps (1 of 2 parameters)|..."),
    "D11-own-replicated": ("reduction", lambda m: m.reduce(lambda name, rank: m.sum(name, [rank])),
        "step 0: gradients are not reduced [D11, S2]|each gradient of every rank is this rank's own gradient "
        "(c = 1.0000, residual ~) (2 of 2 parameters): nothing was reduced over replicate (ranks 0, 2) and shard ..."),
    "D11-twice-replicated": ("reduction", lambda m: m.reduce(lambda name, rank: m.sum(name) + m.sum(name, [rank])),
        "step 0: a rank counts twice [D11, S3]|each gradient of every rank counts this rank twice (c = 1.0000, ..."),
    "D11-sub-mesh": ("reduction", lambda m: m.reduce(lambda name, rank: m.sum(name, [rank & 2, rank | 1])),
        "step 0: some ranks are missing from the gradients [D11, S3]|each gradient of every rank is reduced over shard "
        "(ranks 0-1) only: ranks 2-3 are missing (c = 1.0000, residual ~) (2 of 2 parameters)|all 4 ranks have ..."),
    "D11-last": ("reduction", lambda m: m.reduce(lambda name, rank: m.sum(name, microbatches=[1]) / 4),
        "step 0: gradients lack microbatches [D11, S4]|each gradient of every rank has the last of 2 microbatches only "
        "(c = 0.2500, residual ~) (2 of 2 parameters)|..."),
    "D11-unknown": ("reduction", lambda m: m.reduce(lambda name, rank: torch.ones(8, 3).tril() * m.sum("w"), names="w"),
        "step 0: gradients are not the sum of what ranks computed [D11]|...: a relative distance of ~ remains, "
        "and rounding explains ~ (1 of 2 parameters: 'w')|and they match no known mistake"),
    "D11-tied-late": ("reduction", lambda m: (
        m.reduce(lambda name, rank: torch.ones(8, 3).tril() * m.sum("w"), names="w"), m.wrap("fully_shard"),
        [one.own.update(head=one.own["w"]) for one in m.gradients]),
        "step 0: gradients are not the sum of what ranks computed [D11, S8]|...|seen: 'head', 'w' are one parameter of "
        "the model, and each has a gradient of its own: units of fully_shard() that were made before the tie have two; "
        "tie before fully_shard()"),
    "D11-replaced-replicated": ("reduction", lambda m: (m.never_reduced(), put(m.modules, replaced=["w"], gone=1)),
        "step 0: gradients are not reduced [D11, S2]|...|seen: DistributedDataParallel reduces the parameters that it "
        "was made with, and 'w' replaced one since then: replace, load and tie before wrapping"),
    "D11-gone-replicated": ("reduction", lambda m: (m.never_reduced(), put(m.modules, gone=1)),
        "step 0: gradients are not reduced [D11, S2]|...|seen: DistributedDataParallel reduces the parameters that it "
        "was made with, one of them is no longer the model's, and it waits for all of a bucket: replace, load and tie "
        "before wrapping"),
    "D12": ("reduction", lambda m: m.reduce(lambda name, rank: m.sum(name), names="b"),
        "note: step 0: parameters have different factors [D12, S1]|1 of 2 parameters: the mean over 4 ranks (c = 0.25 "
        "x the sum of 8 parts, residual ~)|'b': c = 1.0000, 4 times as much: the number of ranks|...|meant, as in muP, "
        "for experts or by layer? else these are reduced or scaled otherwise"),
    "D13": ("collectives", lambda m: m.records[2].collectives.clear(), "step 0: ranks issue different collectives "
        "[D13]|collective 0 on ranks [0, 1, 2, 3] differs: ..., rank 2 issued [nothing more]"),
    "D14": ("gathered", lambda m: setattr(m.modules[1], "outdated", ["b"]), "step 0: forwards compute with outdated "
        "parameters [D14]|'b': 1 of 2 parameters stay unsharded over the optimizer's step, and the forward after it "
        "computes with their values from before: ...|reshard before the optimizer's step or the next forward: ..."),
    "D14-note": ("gathered_ever", lambda m: setattr(m.modules[1], "gathered", ["b"]), "note: step 0: units stay "
        "unsharded [D14]|'b': 1 parameter is still unsharded after the optimizer's step, ...|meant, ..."),
    "D15": ("memory", lambda m: m.memory.update({2: [0, 9 << 20, 0, 0]}),
        "note: step 2: memory grows [D15]|rank 1 holds 9.0 MiB more after step 2 than after step 1 (0.0 MiB)"),
    "D16": ("finite", lambda m: (m.at_step(2, "w", math.nan), setattr(m.records[2], "not_finite", [OUTPUT])),
        "step 0: a tensor is not finite [D16]|first: output of '0' on rank 2|seen on rank 2 of 4"),
    "D16-unused": ("finite", lambda m: setattr(m.records[2], "not_finite", [OUTPUT]), "note: step 0: a tensor is not "
        "finite [D16]|first: output of '0' on rank 2|all gradients are finite: meant, ...?|seen on rank 2 of 4"),
    "D17": ("tokens", lambda m: [
        setattr(m.records[n], "losses", LossRecord([(8, 1 / 8), (2 + n, 1 / (2 + n))])) for n in EVERY],
        "note: step 0: each microbatch counts alike, whatever its tokens [D17, S5]|"
        "8, 2, 8, 3, 8, 4, 8, 5 tokens: a token of the microbatch with 2 counts 4 x one of that with 8|seen: "
        "cross_entropy divides by its own tokens (reduction='mean'): sum, divide by ...|..."),
    "D17-ranks": ("tokens", lambda m: [setattr(one, "losses", LossRecord([
        (8, 1 / (9 + n)), (1 + n, 1 / (9 + n))], are_means=False)) for n, one in enumerate(m.records)],
        "note: step 0: each rank counts "
        "alike, whatever its tokens [D17, S5]|9, 10, 11, 12 tokens: a token of the rank with 9 counts 1.333 x one of "
        "that with 12|the loss of each rank is divided by its own tokens: sum, divide by ...|..."),
    "D17-microbatches": ("tokens", lambda m: [setattr(one, "losses", LossRecord([
        (8 + n, 1 / 38), (1 + n, 1 / 10)], are_means=n < 2)) for n, one in enumerate(m.records)],
        "note: step 0: each microbatch of all ranks counts alike, whatever its tokens [D17, S5]|38, 10 tokens: a token "
        "of the microbatch of all ranks with 10 counts 3.8 x one of that with 38|the loss of each microbatch of all "
        "ranks is divided by its tokens on all ranks: sum, divide by ...|..."),
    "D21": ("mixed", lambda m: m.shard(lambda rank, name: (rank, rank == 2, 3)),
        "step 0: parameters are a mixture of ranks' values [D21, S9]|'w', 'b': ranks 0-3 had different values of 2 "
        "parameters when fully_shard() sharded them, and training begins with a part of each rank's|seen: of 'w' rank "
        "2 has one value, as it is initialized, and ranks 0-1, 3 others, as they are loaded|load on each rank ..."),
    "D21-written": ("mixed", lambda m: m.shard(lambda rank, name: (rank, False, 4 if rank == 1 and name == "b" else 3)),
        "note: step 0: parameters are a mixture of ranks' values [D21, S9]|'b': ranks 0-3 had different values of 2 "
        "parameters ...|seen: 'b' was written by another number of calls before: 3 on rank 0, 4 on rank 1, 3 on rank "
        "2, 3 on rank 3|meant, as where each rank draws initial values of its own? else load on each rank ..."),
    "D22": ("recomputed", lambda m: put(m.modules, redrawn={"0.drop": True}),
        "step 0: recomputations draw other random numbers [D22]|'0.drop': the generator has another state when "
        "backward recomputes the module than when its forward began, and both draw from it|gradients are of another "
        "dropout mask than the loss, and are no gradients of it: leave preserve_rng_state=True for ..."),
    "D22-own": ("recomputed", lambda m: put(m.modules[1:], redrawn={"": False}),
        "note: step 0: recomputations draw other random numbers [D22]|'the model': ...|meant, as where these random "
        "numbers have no part in gradients? else leave preserve_rng_state=True for ..."),
    "D23": ("copied", lambda m: m.copy(("w", "b")),
        "step 0: shards are copies [D23]|'w', 'b': ranks 0-3 hold different elements, and the same bits, as of all 2 "
        "sharded parameters whose rows are not all equal|as where each rank draws its shard by the "
        "same seed: draw the full parameter ..."),
    "D23-some": ("copied", lambda m: m.copy(("w", "b"), copied="b"),
        "note: step 0: shards are copies [D23]|'b': ranks 0-3 ..., as of 1 of 2 sharded parameters ...|"
        "meant, as where parts of a parameter begin as copies? else draw the full parameter ..."),
    "D24": ("acts", lambda m: put(m.acts[1:3], divided=["SGD", "SGD"]),
        "step 0: gradients are unscaled again [D24, S5]|unscale_() divides gradients of SGD that an earlier unscale_() "
        "has divided, and to which a backward has added others: 2 times since the step before, on ranks 1-2|gradients "
        "of early microbatches are divided by the scale again and again: call unscale_(), ..."),
    "D25": ("acts", lambda m: put(m.acts, idle=[Idle("StepLR", "SGD", "AdamW", 3, (0.1, 0.05), 0.2, True)]),
        "step 0: a scheduler steps an optimizer that does not step [D25]|StepLR was stepped 3 times and moves the "
        "learning rate of a SGD from 0.1 to 0.05; this optimizer does not step, and an AdamW steps its parameters by "
        "0.2 each time, on ranks 0-3|seen: nothing but schedulers refers to the optimizer of the scheduler|make the "
        "scheduler anew, of the AdamW that steps"),
    "D25-kept": ("acts", lambda m: put(m.acts, idle=[Idle("StepLR", "SGD", "AdamW", 3, (0.1, 0.05), 0.2, False)]),
        "note: step 0: a scheduler steps an optimizer that does not step [D25]|...|meant, as where two optimizers take "
        "turns? else make the scheduler anew, of the AdamW that steps"),
    "D26": ("acts", lambda m: put(m.acts[:1], restored=[("Net", 1)]),
        "step 0: a restored state is the current one [D26]|load_state_dict() of Net is given the tensors that the "
        "model has: its own state_dict() from 1 step before, which optimizers have written since then, on rank 0|the "
        "load changes nothing: keep copies, as by copy.deepcopy(model.state_dict())"),
    "D20": ("buffers_ever", lambda m: put(m.modules[2:3], buffers={"load": (2,)}),
        "note: step 0: buffers differ between ranks [D20, S9]|buffer 'load': equal on ranks 0-3 when training begins, "
        "and not when a later step begins|meant, as for statistics of each rank's own data that training does not use? "
        "else reduce them over these ranks before they change the buffer"),
    "D20-sent": ("buffers_ever", lambda m: (put(m.modules[2:3], buffers={"load": (2,)}), setattr(m, "starts", [
        dataclasses.replace(one, reducers=Reducers(sends_buffers=True)) for one in m.starts])),
        "note: step 0: buffers differ between ranks [D20, S9]|...|seen: DistributedDataParallel broadcasts the buffers "
        "of one rank before each forward, so that updates of other ranks are lost|meant, ..."),
    "D19-by-hand": ("frozen_ever", lambda m: (put(m.gradients, own={}), m.put("b", is_frozen=True)),
        "note: step 0: frozen parameters move [D19]|'b': requires_grad is False, backward computes no gradient, and "
        "the optimizer changes bits|seen: .grad is not None at the optimizer's step|meant, as where user code computes "
        ".grad itself? else set .grad to None where parameters are frozen: of zeros, ..."),
    "D19-held": ("frozen_ever", lambda m: m.put("b", is_frozen=True, before=(1,), after=(1,)),
        "note: step 0: the optimizer holds frozen parameters [D19]|'b': requires_grad is False for 1 of 2 parameters "
        "of optimizers, which do not train|meant, as where a part of the model is frozen? else ..."),
    "D19-replaced": ("frozen_ever", lambda m: setattr(m, "starts", [
        dataclasses.replace(one, built=Built(("w",))) for one in m.starts]),
        "note: step 0: frozen parameters train [D19]|'w': the parameter has replaced one whose requires_grad was "
        "False, and the optimizer moves it|meant, as where a layer is made anew to train? else pass requires_grad on: "
        "nn.Parameter(new, requires_grad=old.requires_grad)"),
}  # fmt: skip


def assert_is(found, expected):
    (text,) = found
    lines = "|".join(line.strip() for line in text.splitlines())
    pattern = re.escape(expected).replace("\\~", "[0-9.e+-]+").replace(r"\.\.\.", ".*")
    assert re.fullmatch(pattern, lines), lines


@pytest.mark.parametrize("name", FOUND)
def test_one_change_is_one_finding(name):
    check, change, expected = FOUND[name]
    made = Made(sharded="replicated" not in name)
    change(made)
    assert_is(render(made, check), expected)


def test_states_that_ranks_divide_are_no_finding_of_a_step_that_moves_nothing():
    made = Made(sharded=True)
    made.put("b", before=(1,), after=(1,))
    made.put("b", [1], state={"exp_avg": (9,)})
    moved = Made(sharded=True)
    moved.put("w", [2, 3], state={})  # the same optimizer: one rank of two has the state, and sends what it makes
    made.records[0].step, moved.records[0].step = 0, 1
    assert list(invariants.check_states_ever([made.evidence(), moved.evidence()])) == []
    apart = Made(sharded=True)
    apart.put("b", after=(1,), before=(1,))
    assert [one.checks for one in invariants.check_states_ever([made.evidence(), apart.evidence()])] == [("D3",)]
    made.put("b", [1], state={})  # owns none of it
    assert list(invariants.check_states_ever([made.evidence()])) == []


@pytest.mark.parametrize("moves", [True, False])
def test_frozen_parameters_that_trained_must_not_move(moves):
    """Without a gradient of the step: one that was computed before the parameter was frozen counts."""
    first, second = Made(), Made()
    put(second.records, step=1)
    put(second.gradients, own={})
    second.put("b", is_frozen=True, **({} if moves else {"before": (1,), "after": (1,)}))
    (found,) = freezing.check_frozen_ever([first.evidence(), second.evidence()])
    title = "frozen parameters move" if moves else "parameters stop training"
    assert (found.title, found.step, found.is_note) == (title, 1, not moves)
    put(second.gradients, own=first.gradients[0].own)
    assert [one.title for one in freezing.check_frozen_ever([first.evidence(), second.evidence()])] == [
        "parameters stop training"
    ]


def test_buffers_that_ranks_have_of_their_own_are_not_compared():
    """Other values when training begins, parts of one model, and ranks of a tensor-parallel group."""
    made = Made()
    put(made.modules[2:3], buffers={"load": (2,)})
    assert len(render(made, "buffers_ever")) == 1
    made.starts[2] = dataclasses.replace(made.starts[2], buffers={"load": (9,)})
    assert render(made, "buffers_ever") == []
    made = Made(tensors_over="tp")
    put(made.modules[1::2], buffers={"load": (2,)})
    assert render(made, "buffers_ever") == []
    put(made.modules[1:2], buffers={})
    assert render(made, "buffers_ever") == []


@pytest.mark.parametrize(
    "change",
    [
        {"had": lambda rank, name: (0, False, rank)},
        {"had": lambda rank, name: (rank, False, 3)},
        {"had": lambda rank, name: (rank, rank == 2, rank), "is_kept": False},
        {"had": lambda rank, name: (rank, rank == 2, 3), "count": 2},
    ],
    ids=["equal", "a seed for each rank", "loaded after it", "few elements"],
)
def test_full_parameters_that_differ_may_be_drawn_by_each_rank_or_replaced_later(change):
    made = Made()
    made.shard(**change)
    assert render(made, "mixed") == []


def test_a_loss_of_each_head_is_none_of_a_microbatch():
    made = Made()
    made.put_all(losses=LossRecord([(8, 1 / 8), (2, 1 / 2), (8, 1 / 8), (2, 1 / 2)]))
    assert render(made, "tokens") == []


def of_layers(factors, *, stage="after_backward"):
    """Return the findings of a step whose parameter ``b`` is one of several layers, with a factor for each."""
    made, names = Made(sharded=False), [f"h.{number}.b" for number in range(len(factors))]
    for name, factor in zip(names, factors, strict=True):
        other = Made(sharded=False)
        if stage == "at_step":
            other.reduce(other.mean, lambda rank, factor=factor: factor / 2, names="b")
        else:
            other.reduce(lambda name, rank, other=other, factor=factor: factor * other.mean(name, rank), names="b")
        for mine, its in zip(made.records, other.records, strict=True):
            mine.parameters[name] = its.parameters["b"]
            for field in ("own", "after_backward", "at_step"):
                getattr(mine.gradients, field)[name] = getattr(its.gradients, field)["b"]
    made.starts = [dataclasses.replace(one, shapes=SHAPES | dict.fromkeys(names, (5,))) for one in made.starts]
    return check_reduction(made.evidence(), [])[0]


@pytest.mark.parametrize("factors", [[2, 2, 2], [0.8, 0.64, 0.512], [4, 2]], ids=["class", "series", "two"])
def test_a_factor_of_a_class_of_modules_is_a_note_and_one_of_a_layer_a_finding(factors):
    (found,) = of_layers(factors)
    assert found.title == "parameters have different factors" and found.is_note == (len(factors) > 2)
    (found,) = of_layers([*factors[:-1], 3 * factors[-1]])
    assert not found.is_note


def test_a_factor_that_user_code_gives_to_a_layer_before_the_step_is_a_note():
    assert of_layers([2, 2, 2], stage="at_step") == of_layers([1, 1, 1], stage="at_step") == []
    (found,) = of_layers([1, 1, 3], stage="at_step")
    assert found.is_note and found.lines[1] == "'h.2.b': by 1.5"


@pytest.mark.parametrize("differs", ["gradients", "states", "some have none"])
def test_what_the_step_gathers_may_differ_before_it(differs):
    """As the states of ZeroRedundancyOptimizer do; a step that moves nothing gathers nothing."""
    made = Made()
    {
        "gradients": lambda: made.at_step(2, "w", 2),
        "states": lambda: made.put("w", [2], state={"m": (9,)}),
        "some have none": lambda: made.gradients[2].at_step.pop("w"),
    }[differs]()
    check = "states" if differs == "states" else "replicas"
    assert render(made, check) == []
    made.put("w", before=(1,), after=(1,))
    assert len(render(made, check)) == 1


def summed_in_step(made):
    made.put_all(collectives=Trace([Collective("step", "reduce_scatter", "float32", 4 * 29, tuple(EVERY))]))


def test_an_optimizer_that_reduces_by_itself_is_not_judged_and_the_note_says_so():
    made = Made(sharded=False)
    made.reduce(lambda name, rank: made.sum(name, [rank]))
    summed_in_step(made)
    (found,) = check_reduction(made.evidence(), [])[0]
    assert found.is_note and found.title == "gradients are reduced in the optimizer's step, and not judged"
    assert render(made, "replicas") == []
    made.put("w", [3], after=(9,))
    (text,) = render(made, "replicas")
    assert text.startswith("step 0: replicas differ after the step [D1, S9]")


@pytest.mark.parametrize("is_equal", [False, True], ids=["apart", "equal"])
def test_ranks_that_nothing_reduces_may_train_apart(is_equal):
    """As in local SGD; of ranks whose parameters are equal all the same, gradients are lost."""
    made = Made(sharded=False)
    made.starts = [dataclasses.replace(one, groups=Groups({}, "", ())) for one in made.starts]
    made.put_all(collectives=Trace())
    made.reduce(lambda name, rank: made.sum(name, [rank]))
    if not is_equal:
        made.put("w", [1], after=(9,))
    (found,) = check_reduction(made.evidence(), [])[0]
    assert (found.title, found.is_note) == ("gradients are not reduced", not is_equal)


def test_a_hook_that_compresses_is_a_note_and_one_that_loses_a_rank_a_finding():
    made = Made(sharded=False)
    made.starts = [dataclasses.replace(one, reducers=Reducers(hooks=("my_hook",))) for one in made.starts]
    torch.manual_seed(1)
    noise = {name: torch.randn(shape).double() for name, shape in SHAPES.items()}
    made.reduce(lambda name, rank: made.mean(name, rank) + noise[name] / 4)
    (found,) = check_reduction(made.evidence(), [])[0]
    assert found.is_note and found.title == "a communication hook changes gradients, which are not judged"
    made.reduce(lambda name, rank: made.sum(name, [0, 1, 3]) / 4 + noise[name] / 40)
    (found,) = check_reduction(made.evidence(), [])[0]
    assert not found.is_note and "without rank 2" in found.lines[0], found


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_gradients_are_rounded_to_the_dtype_in_which_they_are_reduced(dtype):
    """As DDP's fp16_compress_hook and fully_shard's reduce_dtype do."""
    made = Made(sharded=False)
    nbytes = 2 * 29 if dtype == "float16" else 4 * 29
    made.put_all(collectives=Trace([Collective("backward", "all_reduce", dtype, nbytes, tuple(EVERY))]))
    made.reduce(lambda name, rank: made.mean(name, rank).half().double())
    assert [one.title for one in check_reduction(made.evidence(), [])[0]] == (
        [] if dtype == "float16" else ["gradients are not the sum of what ranks computed"]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sum_that_is_rounded_once_for_each_rank_is_right(dtype):
    """As DDP's in its plainest form, in the dtype of the gradients."""
    made = Made(sharded=False)
    nbytes = 29 * dtype.itemsize
    name_of_dtype = str(dtype).removeprefix("torch.")
    made.put_all(collectives=Trace([Collective("backward", "all_reduce", name_of_dtype, nbytes, tuple(EVERY))]))

    def rounded(name, rank):
        found = torch.zeros(SHAPES[name], dtype=dtype)
        for one in EVERY:
            found += (made.sum(name, [one]) / len(EVERY)).to(dtype)
        return found.double()

    made.reduce(rounded)
    assert check_reduction(made.evidence(), [])[0] == []


def test_a_bias_before_a_normalization_need_not_move():
    """Its gradient is rounding noise, and so is an update that SGD makes of it."""
    made = Made()
    made.reduce(lambda name, rank: made.mean(name, rank) * 1e-9, names="b")
    made.put("b", before=(1,), after=(1,), largest=0.3)
    assert render(made, "updates") == []


def test_several_forwards_of_a_batch_for_one_backward_are_meant():
    """As in R-Drop; of a forward without a backward nothing is computed."""
    made = Made()
    for rank, record in enumerate(made.records):
        record.forwards = forwards(rank, rank, rank + 10, rank + 10, after=[0, 0, 1, 2])
    assert render(made, "data") == []


@pytest.mark.parametrize("is_reduced", [True, False], ids=["reduced", "unreduced"])
@pytest.mark.parametrize("is_meant", [True, False], ids=["meant", "lost"])
def test_what_is_dropped_in_each_step_is_lost_unless_it_was_no_microbatch(is_meant, is_reduced):
    """As in SAM, which drops the gradients by which it has moved the parameters; the rest must still be reduced."""
    examination = Examination([codes.REDUCED_ONCE], waits=False)
    for step in range(2):
        made = Made(sharded=False)
        made.put_all(step=step, norms=NormRecord())
        for mine in made.gradients:
            mine.drops = [Drop(1, is_meant)]
        made.reduce(lambda name, rank, made=made: made.sum(name, EVERY if is_reduced else [rank], [1]) / 4)
        examination.add(examination.judge(made.evidence(), []))
        examination.add(examination.settle())
    for found in examination.at_the_end():
        examination.add(found)
    titles = [one.title for one in examination.findings if not one.is_note]
    of_meant = [] if is_reduced else ["gradients are not reduced"]
    assert titles == (of_meant if is_meant else ["gradients lack microbatches"])


def test_an_optimizer_may_have_parameters_that_get_gradients_elsewhere():
    """As where a loop calls the modules of a model, or a method of it, and not the model."""
    made = Made()
    made.put_all(optimizers=[Optimizer("AdamW", 3, 2, False, outside=1)])
    assert render(made, "optimizers") == []
    made.put_all(optimizers=[Optimizer("AdamW", 4, 2, False, outside=1)])
    line = "1 of the 4 parameters of AdamW are not the model's|its step does not move the model's own"
    assert_is(render(made, "optimizers"), f"step 0: the optimizer holds some dead parameters [D4, S7]|{line}")
    made.put_all(optimizers=[Optimizer("AdamW", 2, 0, False, outside=2)])
    assert render(made, "optimizers") == []


@pytest.mark.parametrize(("norm", "named"), [(sum, "sum"), (max, "largest"), (lambda norms: norms[0] ** 0.3, "")])
def test_ranks_that_reduce_norms_in_place_of_squares(norm, named):
    """Each step is clipped to another norm, which is the same round number as the loop computes norms."""
    seen = []
    for step in range(2):
        made = Made()

        def full(name, rank, made=made, step=step):
            mean = made.mean(name, rank)
            mean[:3] *= 1 + 3 * step
            return mean

        made.reduce(full)
        scale = 0.3 / norm([made.local_norm(rank) for rank in EVERY])
        made.reduce(full, lambda rank, scale=scale: scale)
        seen.append(made.evidence())
    found = [one.render() for one in norms.check_limit(seen)]
    if not named:
        assert found == []
        return
    line = f"gradients are clipped to 0.3 by the {named} of the norms of each rank's shards: all ..."
    assert_is(found, f"step 0: the norm is not the norm of all gradients [D10, S6]|{line}")


def test_parts_of_one_model_read_the_same_data():
    """Their gradients of the same elements are one contribution, and so the factor is that of two readers."""
    made = Made(tensors_over="tp")
    assert made.evidence().readers == [(0, 1), (2, 3)]
    (factor,) = check_reduction(made.evidence(), [])[1].factors
    assert factor.render().startswith("the mean over 2 ranks (c = 0.5 x the sum of 4 parts, ")
    made.records[1].forwards = forwards(7, 8)
    line = "ranks 0-1 (tp) are parts of one model and read different microbatches"
    assert_is(render(made, "data"), f"step 0: model-parallel ranks read different data [D9, S11]|{line}")


def test_data_ranks_read_the_same_also_where_their_own_ranks_compute_parts():
    """Of norms under sequence parallelism each rank has all elements, and the part of them that its tokens give."""
    made = Made(sharded=False, tensors_over="tp")
    for record, mine in zip(made.records[2:], made.gradients[2:], strict=True):
        record.forwards = made.records[0].forwards
        mine.own = made.gradients[record.rank - 2].own
    made.gradients[1].own = made.gradients[3].own = {
        n: [(m, gradient(torch.ones(s))) for m in range(2)] for n, s in SHAPES.items()
    }
    (found,) = invariants.check_data(made.evidence())
    assert not found.is_note and found.title == invariants.SAME
    made.gradients[3].own = {n: [(m, gradient(torch.zeros(s))) for m in range(2)] for n, s in SHAPES.items()}
    (found,) = invariants.check_data(made.evidence())
    assert found.is_note


def test_an_optimizer_need_not_step_in_each_step():
    """Until it does, gradients add up."""
    first, second = Made(), Made()
    first.put("w", optimizer=None)
    second.reduce(lambda name, rank: second.mean(name, rank) + (first.mean(name, rank) + 1 if name == "w" else 0))
    seen = [first.evidence(), second.evidence()]
    found, reduced = check_reduction(seen[0], [])
    assert found == check_reduction(seen[1], [reduced])[0] == list(updates.check_optimizers_ever(seen)) == []
    assert len(list(updates.check_optimizers_ever(seen[:1]))) == 1


def test_what_user_code_mixes_of_returned_gradients_is_no_multiple_by_chance():
    """As in gradient surgery, where the head of one task has a part of one alone."""
    made = Made()
    made.reduce(lambda name, rank: torch.ones(8, 3).tril() * made.sum("w"), names="w")
    made.reduce(lambda name, rank: made.sum("b") * 0.2501, names="b")
    assert len(check_reduction(made.evidence(), [])[0]) == 1
    put(made.gradients, returned=["w", "b"])
    found, reduced = check_reduction(made.evidence(), [])
    assert found == reduced.factors == [] and set(reduced.unseen) == {"w", "b"}
    made.reduce(made.mean, names="b")
    assert [one.names for one in check_reduction(made.evidence(), [])[1].factors] == [("b",)]


def test_what_no_optimizer_has_is_judged_in_the_first_step_alone():
    """Nobody zeroes its gradient, which D4 tells; clipping scales what is left of each step."""
    made = Made()
    made.reduce(lambda name, rank: torch.ones(8, 3).tril() * made.sum("w"), names="w")
    made.put("w", optimizer=None)
    assert len(check_reduction(made.evidence(), [])[0]) == 1
    assert check_reduction(made.evidence(), [Reduced()])[0] == []
    made.put("b", optimizer=None)
    assert len(check_reduction(made.evidence(), [Reduced()])[0]) == 1, "nobody knows of an optimizer"


def test_equal_parts_of_a_constant_are_no_replicas():
    """A weight of a norm is all ones: the halves that two ranks of a replica hold have one shape and the same bits."""
    bits, start = {"norm.weight": (Box((8,)), (), (0, 0))}, {"replicated": (), "model": "Norm", "shapes": {}}
    flat = [{"norm.weight": (8, members)} for members in ((0, 1), (0, 1), (2, 3), (2, 3))]
    held, differ = holders_of([Start(Groups({}, "", ()), bits, **start, flat=one) for one in flat])
    assert held == {"norm.weight": [(0, 2), (1, 3)]} and not differ


def test_of_a_sum_that_is_pending_each_part_counts_once():
    """Ranks 0 and 1 have one part of it, 2 and 3 the other."""
    made = Made()
    for rank, mine in enumerate(made.gradients):
        mine.at_step["w"] = gradient(made.sum("w", [rank // 2]), pending=(rank % 2, rank % 2 + 2))
    expected = digest(made.sum("w", [0, 1])).numbers[:-1]
    torch.testing.assert_close(made.evidence().assembled("w", 1, "at_step"), expected)


@pytest.mark.parametrize("is_seen", [False, True])
@pytest.mark.parametrize("combined", [sum, max])
def test_a_sum_of_norms_is_named_and_an_all_reduce_only_where_one_was_seen(combined, is_seen):
    one_number = Collective("between", "all_reduce", "float32", 4, tuple(EVERY))
    seen = []
    for factor in (1.0, 5.0):
        made = Made()
        first = torch.ones(8, 1)
        first[:4] *= factor  # what ranks hold grows by factors of their own
        mean = lambda name, rank, made=made, first=first: made.mean(name, rank) * (first if name == "w" else 1)  # noqa: E731
        made.reduce(mean)
        scale = 0.1 / combined([made.local_norm(rank) for rank in EVERY])
        made.reduce(mean, lambda rank, scale=scale: scale)
        made.put_all(collectives=Trace([one_number] * is_seen))
        seen.append(made.evidence())
    (found,) = norms.check_limit(seen)
    assert f"clipped to 0.1 by the {'sum' if combined is sum else 'largest'} of the norms" in found.lines[0]
    mend = "reduce the sum of the squares, and take its root last"
    assert found.lines[1] == ("seen: an all_reduce of one number before the step: " if is_seen else "") + mend


def test_a_limit_that_only_fits_a_number_is_no_finding_where_ranks_hold_other_elements():
    """A user may clip to the root of a half."""
    made = Made()
    made.reduce(made.mean, lambda rank: math.sqrt(0.5) / made.norm())
    made.starts = [dataclasses.replace(one, bits={name: (made.box(name, rank), (), (rank,)) for name in SHAPES})
                   for rank, one in enumerate(made.starts)]  # fmt: skip
    assert render(made, "limit") == []


def test_a_factor_of_a_hook_of_a_parameter_is_one_of_its_layer():
    """What hooks of user code multiply a gradient by is no part of what autograd has computed."""
    made = Made(sharded=False)
    for record in made.records:
        record.gradients.given = {"b": [(n, gradient(2 * made.parts[record.rank][n]["b"])) for n in range(2)]}
    (text,) = render(made, "reduction")
    assert "'b': c = 0.1250, 0.5 times as much" in text and "(register_hook) multiplies its gradient by 0.5" in text
    # What is more than a factor, as a mask or a limit, is judged by what it leaves.
    for record in made.records:
        record.gradients.given = {"b": [(n, gradient(made.parts[record.rank][n]["b"] ** 3)) for n in range(2)]}
    assert render(made, "reduction") == []


def test_what_tensor_parallel_ranks_have_reduced_over_data_parallel_ones_alone():
    """Each has the mean of its own and of its data-parallel peer's, where the sum over the others is missing."""
    made = Made(sharded=False, tensors_over="tp")
    for rank, record in enumerate(made.records):
        made.parts[rank] = [{n: one + rank % 2 * one.roll(1) for n, one in part.items()} for part in made.parts[rank]]
        record.gradients.own = {n: [(m, gradient(made.parts[rank][m][n])) for m in range(2)] for n in SHAPES}
    made.reduce(lambda name, rank: made.sum(name, [rank, (rank + 2) % 4]) / 2)
    made.put("w", [1, 3], after=(9,))
    made.put("b", [1, 3], after=(9,))
    (text,) = render(made, "replicas")
    assert "each rank has its own gradients, reduced over its data-parallel ranks: if ranks" in text
    for mine in made.gradients:
        mine.at_step = {name: gradient(torch.randn(shape)) for name, shape in SHAPES.items()}
    assert "they are not the rank's own gradients" in render(made, "replicas")[0]
