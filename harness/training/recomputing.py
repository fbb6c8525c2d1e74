"""Does a recomputation in backward draw the random numbers of its forward? (D22)"""

from collections.abc import Iterator

from shardproof.harness.judging import codes
from shardproof.harness.training.evidence import Evidence
from shardproof.harness.training.findings import DoctorFinding, listed


def check_recomputed(evidence: Evidence) -> Iterator[DoctorFinding]:
    """D22: gradients are of the random numbers of the loss.

    A note of modules of user code, whose random numbers may have no part in gradients, and of recomputations that torch
    does not make, which may be other computations; and of norms, whose running statistics the recomputation moves.
    """
    redrawn: dict[str, bool] = {}
    for record in evidence.records:
        for name, is_torch in record.modules.redrawn.items():
            redrawn[name] = redrawn.get(name, True) and is_torch
    for is_note in (False, True):
        if names := [name or "the model" for name, is_torch in redrawn.items() if is_torch != is_note]:
            yield _of_redrawn(evidence, names, is_note=is_note)
    moving = [one.name or "the model" for one in evidence.records[0].modules.beside.modes if one.moves_again]
    if moving:
        lines = (
            f"{listed(moving)}: moves its running statistics in the forward, and again where backward recomputes it",
            "meant, as with a momentum for two updates? else leave norms of running statistics out of what is "
            "recomputed: evaluation normalizes by statistics that move twice a step",
        )
        title = "running statistics move twice a step"
        yield DoctorFinding((codes.RECOMPUTED,), "", evidence.step, title, lines, is_note=True)


def _of_redrawn(evidence: Evidence, names: list[str], *, is_note: bool) -> DoctorFinding:
    mend = "leave preserve_rng_state=True for what draws random numbers"
    if is_note:
        end = f"meant, as where these random numbers have no part in gradients? else {mend}"
    else:
        end = f"gradients are of another dropout mask than the loss, and are no gradients of it: {mend}"
    lines = (
        f"{listed(names)}: the generator has another state when backward recomputes the module than when its forward "
        "began, and both draw from it",
        end,
    )
    title = "recomputations draw other random numbers"
    return DoctorFinding((codes.RECOMPUTED,), "", evidence.step, title, lines, is_note)
