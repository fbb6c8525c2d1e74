"""The codes at the end of a finding: signatures, the known mistakes, and the checks of the doctor.

This is the one table of them. Whatever finds a mistake names a constant of this module, and no other module of the
harness, of the commands or of the suites has a code in a text of its own (``tests/test_codes.py``). ``docs/doctor.md``
has the rows for readers; there and in the table they are the same.

Codes are plain strings, so that a run file, a recording and a user who reads ``doctor.findings`` have no other type.

A row says what a code stands for, what to do about it, and which planted mistake shows it. What tells it is a function
where its values are:

- S1 to S5 and S12 are told from vectors (``judging.signatures.diagnose``), S6 and S13 from values (``guess_norm`` and
  ``guess_from_values`` there); of the others there is nothing to compare, and the doctor's checks tell them.
- D1 to D3, D5, D8, D9 and D13 to D16 are ``training.invariants``, D4, D6, D7 and D18 ``training.updates``, D10
  ``training.norms``, D11 and D12 ``training.reduction``, D17 ``training.tokens``, D19 ``training.freezing``,
  D20 ``training.buffers``, D21 and D23 ``training.sharded``, D22 ``training.recomputing``, D24 to D27
  ``training.acts``, D28 ``training.later``, which compares later steps with the watched ones, D29 ``training.rows``
  and ``training.division``,
  D30 ``training.labels``, D31 ``training.followers``, D32 ``training.crossings`` and
  ``training.boundary``.

A signature never decides a verdict.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Final

# Signatures: what a gradient, a norm or a parameter is.

SCALED: Final = "S1"
UNREDUCED: Final = "S2"
SOME_RANKS: Final = "S3"
SOME_MICROBATCHES: Final = "S4"
WEIGHTED: Final = "S5"
LOCAL_NORM: Final = "S6"
UNMOVED: Final = "S7"
UNTIED: Final = "S8"
APART: Final = "S9"
MISSING: Final = "S10"
SHARED_DATA: Final = "S11"
MISPLACED: Final = "S12"
ROUNDED: Final = "S13"

# Checks: what holds in each right training.

EQUAL_PARAMETERS: Final = "D1"
EQUAL_GRADIENTS: Final = "D2"
EQUAL_STATES: Final = "D3"
OPTIMIZED: Final = "D4"
HAS_GRADIENT: Final = "D5"
MOVES: Final = "D6"
HAS_STATE: Final = "D7"
TIES: Final = "D8"
DATA: Final = "D9"
NORM: Final = "D10"
REDUCED_ONCE: Final = "D11"
ONE_FACTOR: Final = "D12"
COLLECTIVES: Final = "D13"
RESHARDED: Final = "D14"
MEMORY: Final = "D15"
FINITE: Final = "D16"
TOKENS: Final = "D17"
STEPS_ALIKE: Final = "D18"
FROZEN: Final = "D19"
BUFFERS: Final = "D20"
INITIAL: Final = "D21"
RECOMPUTED: Final = "D22"
COPIED: Final = "D23"
UNSCALED: Final = "D24"
SCHEDULED: Final = "D25"
RESTORED: Final = "D26"
PACED: Final = "D27"
STANDS: Final = "D28"
ROWS: Final = "D29"
LABELS: Final = "D30"
FOLLOWERS: Final = "D31"
CROSSINGS: Final = "D32"


@dataclasses.dataclass(frozen=True)
class Code:
    """A row of the table.

    Attributes:
        code: "S2" or "D11".
        name: what it is about, in words with hyphens; of a check the name of its record in a run file.
        sentence: of a signature what the gradient or the norm is, of a check what holds in each right training.
        mend: what to do.
        planted: a mistake that shows it, as "file::row": the row of a table of loops, incidents or changed records.
        anchor: where the documentation has it.
    """

    code: str
    name: str
    sentence: str
    mend: str
    planted: str
    anchor: str = "docs/doctor.md#what-it-checks"


_INCIDENTS = "tests/test_incidents.py::"
_LOOPS = "tests/harness/test_doctor_loops.py::"
_STATES = "tests/harness/test_doctor_states.py::"
_GATHERS = "tests/harness/test_doctor_gathers.py::"
_ACTS = "tests/harness/test_doctor_acts.py::"
_LATER = "tests/harness/test_doctor_later.py::"
_DATA = "tests/harness/test_doctor_data.py::"
_FOLLOWERS = "tests/harness/test_doctor_followers.py::"
_RECORDS = "tests/harness/test_doctor_checks.py::"


def _by_code(rows: Iterable[Code]) -> Mapping[str, Code]:
    return {one.code: one for one in rows}


SIGNATURES = _by_code([
    Code(SCALED, "scaled", "the full sum, times a factor",
         "multiply the loss, or the gradients, by the named factor", _INCIDENTS + "g01_divided_twice"),
    Code(UNREDUCED, "unreduced", "one rank's own gradient: nothing was reduced",
         "call the wrapped module, and have the last backward of a step outside of `no_sync()`",
         _INCIDENTS + "g02_no_sync"),
    Code(SOME_RANKS, "some-ranks", "reduced without some ranks, or with one rank twice",
         "give the wrapper the mesh or the group of all ranks whose data differ", _INCIDENTS + "g03_sub_mesh"),
    Code(SOME_MICROBATCHES, "some-microbatches",
         "a sum without some microbatches, with one twice, or with microbatches of earlier steps",
         "call `zero_grad()` once, after the step", _INCIDENTS + "g04_zero_grad"),
    Code(WEIGHTED, "weighted", "a sum of microbatches with different weights",
         "divide the loss by the tokens of the whole step", _INCIDENTS + "g05_means_of_means",
         "docs/doctor.md#the-mend-of-d17"),
    Code(LOCAL_NORM, "local-norm",
         "the norm of one rank's shards, or a norm that counts an element on each rank that has it",
         "clip by the norm of all gradients, each element once", _INCIDENTS + "g06_local_norm"),
    Code(UNMOVED, "unmoved", "the gradient of a parameter that no optimizer moves",
         "make the optimizer after the model is sharded, from the parameters that the model has then",
         _INCIDENTS + "g07_early_optimizer"),
    Code(UNTIED, "untied", "the gradient of a parameter that was tied", "tie it again after its storage is replaced",
         _INCIDENTS + "g08_untied"),
    Code(APART, "apart", "different on ranks that hold the same elements",
         "sum or broadcast it over the named dimension", _INCIDENTS + "g09_sequence_parallel_norm"),
    Code(MISSING, "missing", "missing",
         "keep a path from the loss to the parameter, through collectives that have a backward",
         _INCIDENTS + "g10_detached_router"),
    Code(SHARED_DATA, "shared-data", "the gradient of data that several ranks read",
         "give each data-parallel rank samples of its own, and model-parallel ranks the same",
         _LOOPS + "sampler repeats"),
    Code(MISPLACED, "misplaced", "the gradient of an earlier step, or of another rank's shard",
         "wait for the reduction in the step itself; load shards in the order of ranks",
         _INCIDENTS + "g15_stale_reduction"),
    Code(ROUNDED, "rounded", "rounded to a narrower dtype",
         "keep it in the wider dtype, unless the narrower one is meant", _RECORDS + "D6-lost"),
])  # fmt: skip
"""The signatures by their codes, in their order."""

CHECKS = _by_code([
    Code(EQUAL_PARAMETERS, "replicas-have-equal-parameters",
         "ranks that hold the same elements of a parameter hold the same bits, at the start and after each step",
         "begin with one seed or a broadcast, and apply the same updates on all of them", _LOOPS + "one rank skips"),
    Code(EQUAL_GRADIENTS, "replicas-have-equal-gradients",
         "ranks that hold the same elements have gradients of the same bits at the optimizer's step, unless the step "
         "moves parameters that are equal after it",
         "reduce them over these ranks, and scale them by one number", _INCIDENTS + "g09_sequence_parallel_norm"),
    Code(EQUAL_STATES, "replicas-have-equal-optimizer-states",
         "ranks that hold the same elements have optimizer states of the same bits, unless a step of the optimizer "
         "shows that ranks divide its work",
         "load the same states on all of them", _RECORDS + "D3"),
    Code(OPTIMIZED, "the-optimizer-has-what-trains",
         "the optimizer's parameters are the model's, and each parameter that requires a gradient is in one (a note of "
         "one that does not step in the watched steps)",
         "make the optimizer after the model is sharded, from all parameters that train",
         _INCIDENTS + "g07_early_optimizer"),
    Code(HAS_GRADIENT, "each-parameter-gets-a-gradient",
         "each parameter that requires a gradient gets one in one of the steps (a note of modules that no forward "
         "calls, as where layers are drawn at random)",
         "use it in the loss, or set `requires_grad=False`", _INCIDENTS + "g10_detached_router"),
    Code(MOVES, "each-parameter-moves",
         "a parameter whose gradient is not zero moves in the step (a note where the update of most elements, or of "
         "a moment, is below the spacing of its values, or its learning rate is 0 and that of others is not)",
         "give it a learning rate, or values of a wider dtype", _LOOPS + "parameter held back"),
    Code(HAS_STATE, "each-parameter-has-optimizer-state",
         "a parameter that does not move has optimizer state if others of its optimizer have",
         "let the optimizer step it", _RECORDS + "D7"),
    Code(TIES, "ties-are-kept",
         "tied parameters are still one parameter (a note where user code replaces one of the two)",
         "tie them again after their storage is replaced",
         _INCIDENTS + "g08_untied"),
    Code(DATA, "data-differ-where-they-should",
         "data-parallel ranks read different microbatches, and model-parallel ranks the same; no rank computes "
         "gradients of one microbatch twice in a step (notes where each step reads the same, and where ranks have one "
         "argument of the forward, or some of its columns, alike)",
         "give data-parallel ranks different samples, and model-parallel ranks the same", _LOOPS + "sampler repeats"),
    Code(NORM, "the-norm-is-the-norm",
         "the scale between backward and step is the same on all ranks; gradients are clipped by the norm of all "
         "gradients",
         "clip by the norm over all ranks, once gradients are unscaled", _INCIDENTS + "g06_local_norm"),
    Code(REDUCED_ONCE, "gradients-are-reduced-once",
         "each gradient is one factor times the sum of the gradients that all ranks computed from all microbatches (a "
         "note where steps begin to have more microbatches, and the loss of each has the factor of before)",
         "see its signature", _INCIDENTS + "g02_no_sync"),
    Code(ONE_FACTOR, "one-factor",
         "all parameters have the same factor (a note where a whole class of modules has another one, as in muP, and "
         "of experts that DDP ignores)",
         "reduce and scale all of them alike", _LOOPS + "wrong factor"),
    Code(COLLECTIVES, "collectives-agree",
         "the members of a group issue the same collectives, reductions by the same operator, as far as they are "
         "issued from Python",
         "take the same branches on all ranks", _LOOPS + "numbers mixed up"),
    Code(RESHARDED, "units-are-resharded",
         "forwards compute with the current values of the shards; no unit stays unsharded after the step (a note)",
         "`set_reshard_after_backward(True)` for the last backward of a step",
         _GATHERS + "resharded-before-the-step"),
    Code(MEMORY, "memory-is-flat",
         "allocated memory does not grow from step to step (a note; accelerators only)",
         "keep no tensor with its graph after the step, such as a loss that is summed for a log", _RECORDS + "D15"),
    Code(FINITE, "all-is-finite",
         "no module output and no gradient is NaN or infinite; the first is named (a note where all gradients are "
         "finite)",
         "look into the named module", _RECORDS + "D16"),
    Code(TOKENS, "each-token-counts-alike",
         "a token counts as much as any other in the loss of the step, whichever rank and microbatch it is in (a note, "
         "because a mean of means may be meant)",
         "divide the loss by the tokens of the whole step", _RECORDS + "D17", "docs/doctor.md#the-mend-of-d17"),
    Code(STEPS_ALIKE, "ranks-step-alike",
         "ranks that hold parts of one parameter step them by the same learning rate and other settings, from "
         "optimizer states of the same age",
         "compute settings from values of all ranks, and load states on all of them", _LOOPS + "plateau by rank"),
    Code(FROZEN, "frozen-parameters-stay",
         "a parameter that requires no gradient does not move in the optimizer's step (notes of frozen parameters in "
         "an optimizer, and of parameters that replace frozen ones or become frozen between steps)",
         "set `.grad` to None where parameters are frozen, and copy `requires_grad` to their replacements",
         _STATES + "frozen and stepped"),
    Code(BUFFERS, "replicas-have-equal-buffers",
         "buffers that are equal on data-parallel ranks when training begins are equal when each step begins (a note; "
         "statistics of torch's own modules may differ); no rank has zeros or NaN in a buffer or a tensor of a module "
         "that never changes, where others have one table of values (a note of other constants that differ)",
         "reduce the values that update the buffer over the data-parallel ranks; fill constants on each rank",
         _STATES + "router by rank"),
    Code(INITIAL, "initial-values-are-of-one-model",
         "no parameter is a mixture of values that differed between ranks before `fully_shard()` or "
         "`FullyShardedDataParallel` (a note where each rank may have drawn its own)",
         "load on each rank before sharding, or broadcast the values of one rank after it",
         _STATES + "loaded by one rank"),
    Code(RECOMPUTED, "recomputations-repeat-random-numbers",
         "a recomputation in backward draws the random numbers of its forward (a note of modules of user code, and of "
         "recomputations other than torch's), and does not move running statistics again (a note)",
         "leave `preserve_rng_state=True` of activation checkpoints, and norms with running statistics out of them",
         _STATES + "recomputes another dropout"),
    Code(COPIED, "shards-are-no-copies",
         "when training begins, the shards of a parameter on different ranks are not equal bit for bit, unless their "
         "rows are all equal (a note where this holds of some parameters only)",
         "draw the full parameter by one seed and take the rank's part, or draw shards by a seed for each rank",
         _ACTS + "shards by one seed"),
    Code(UNSCALED, "gradients-are-unscaled-once",
         "a loss scaler divides each gradient once before the step",
         "call `unscale_()` once in a step, after the last backward", _ACTS + "unscaled in each microbatch"),
    Code(SCHEDULED, "schedulers-drive-what-steps",
         "a scheduler sets the learning rates of an optimizer that steps (a note where this optimizer may step later)",
         "make the scheduler anew with the optimizer", _ACTS + "scheduler of an earlier optimizer"),
    Code(RESTORED, "what-is-restored-is-a-copy",
         "a state dict that is loaded back is not the model's own tensors, which optimizers have written since; keys "
         "of a state that is loaded into what trains are its names, and the next step does not undo the load",
         "keep a copy: `copy.deepcopy(model.state_dict())`; remove prefixes such as `_orig_mod.` from keys; load "
         "master weights too", _ACTS + "restored from its own tensors"),
    Code(PACED, "schedulers-step-once",
         "a scheduler is stepped once for each step of its optimizer (a note)",
         "call its `step()` where the optimizer steps, or count its length in its own calls",
         _LATER + "scheduled for each microbatch"),
    Code(STANDS, "what-was-set-stays",
         "training modes of modules, and equal states of random generators of ranks, are in later steps as they were "
         "in the watched ones, and generators that differed between ranks are not in one state; groups of an "
         "optimizer that were given different learning rates do not step by one "
         "(notes)",
         "call `model.train()` after an evaluation, draw there by a generator of its own, and scale the rate of each "
         "group by its own",
         _LATER + "evaluation mode stays"),
    Code(ROWS, "rows-are-divided",
         "in an epoch of data that data-parallel ranks divide no two of them read the same row, and none trains on "
         "rows of another's evaluation; a sampler that shuffles gives each epoch another order (notes); no sampler "
         "divides once more a part of the data that one rank has",
         "shuffle by one seed and the epoch's number on all ranks, and take the rank's part then",
         _DATA + "permutation by rank"),
    Code(LABELS, "labels-fit-the-inputs",
         "labels of a causal model are not the inputs rolled within the row that a rank has; labels that count columns "
         "gathered from ranks begin at those of the rank; tables of names give a name one number on all ranks (a note)",
         "shift labels before rows are divided, add the rank's offset to labels, and sort names that are numbered",
         _DATA + "rolled"),
    Code(FOLLOWERS, "copies-follow-the-model",
         "copies of a root that no optimizer steps (a moving average, a teacher, a target) are alike on ranks whose "
         "parameters are equal, are written on all ranks that have shards of them, and once in a step, in a dtype that "
         "has room for the update (notes but for copies that each rank drew)",
         "copy the parameters once they are equal on all ranks, in float32, and write the copy after the step",
         _FOLLOWERS + "teacher before the broadcast"),
    Code(CROSSINGS, "collectives-have-their-adjoint",
         "the backward of a collective in a `torch.autograd.Function` has the gradients that other ranks have for what "
         "the rank sent, and padding of what is gathered takes no part in the loss (notes); for each microbatch that a "
         "pipeline stage sends, its backward has the gradient that the next stage computes for this microbatch",
         "sum the gradients over the ranks in backward, and take the rank's part of the sum; keep microbatches of a "
         "pipeline in the order of their gradients",
         _FOLLOWERS + "gather takes its slice"),
])  # fmt: skip
"""The checks by their codes, in their order."""
