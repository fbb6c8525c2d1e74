"""Each capability, and each option, is checked by itself: an item needs it alone, and what ignores it fails there."""

import pytest

from planted import table
from shardproof import contract
from shardproof.harness.adapters.capability import COMMON, EVERY, PREREQUISITES, Capability
from shardproof.harness.adapters.config import ORDERED

#: Those that this torch has for no implementation. Their items run with a torch that has them.
NOT_HERE = {Capability.ORDERED_GROUPS, Capability.ORDERED_MESHES} - ORDERED

#: Those that no CPU shows to be ignored: why.
WITHOUT_CONSEQUENCE = {
    Capability.SHARE_COMM_CTX: "models that share no streams and no buffers in flight train alike",
    Capability.PAGEABLE_OFFLOAD: "memory that is pinned nevertheless holds the same values, and trains alike",
}


def allowed(capability: str) -> frozenset[str]:
    """What an item that checks a capability by itself may need."""
    return COMMON | PREREQUISITES.get(capability, frozenset()) | {capability}


@pytest.mark.parametrize("capability", sorted(EVERY))
def test_an_item_needs_the_capability_alone(capability):
    needs = [item.needs for item in contract.items().values() if capability in item.needs]
    nearest = min(needs, key=lambda found: len(found - allowed(capability)))
    others = sorted(nearest - allowed(capability))
    assert not others, f"each item that needs {capability} needs others too, one of them {', '.join(others)}"


@pytest.mark.parametrize("capability", sorted(EVERY - NOT_HERE - WITHOUT_CONSEQUENCE.keys()))
def test_an_adapter_that_ignores_it_fails_there(capability):
    """tests/test_planted.py runs the rows; of these items at least one needs the capability alone."""
    bugs = [bug for bug in table.every().values() if bug.ignores == capability]
    assert bugs, f"planted/*.toml has no row that ignores {capability}: planted/ignoring.py makes most"
    needs = {bug.id: contract.items()[item_of(bug)].needs for bug in bugs}
    alone = {id_ for id_, found in needs.items() if capability in found and found <= allowed(capability)}
    assert alone, f"{capability}: the items of {', '.join(needs)} need others too, or do not need it"


def test_no_prerequisite_is_superfluous():
    """Without it, more adapters could be checked."""
    of_row = {}
    for bug in table.every().values():
        if bug.ignores in PREREQUISITES:
            needs = contract.items()[item_of(bug)].needs
            if bug.ignores in needs and needs <= allowed(bug.ignores):
                of_row.setdefault(bug.ignores, set()).update(needs)
    superfluous = {one: sorted(PREREQUISITES[one] - needs) for one, needs in of_row.items()}
    assert not {one: others for one, others in superfluous.items() if others}


def item_of(bug: table.Bug) -> str:
    """The id of the item of a row, as the list of the contract has it."""
    return bug.item.replace(f"[{bug.implementation}-", "[", 1)
