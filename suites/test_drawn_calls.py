"""Chapter DRAWN: public calls in an order that nobody wrote down, on a drawn model.

The third kind of drawn case. ``test_drawn.py`` draws models, meshes and schedules of whole steps, and
``test_drawn_crossed.py`` has features three at a time; in both a training makes its calls in the usual order. Here the
order is drawn: what a call leaves behind shows in another that follows much later. The chapter CALLS is about each
call by itself: ``test_calls_anytime.py`` makes calls that are to change nothing, all of a family, in each moment of one
training.

Which calls there are, when each is legal and which a finding says are wrong are the tables of
``harness/models/programs.py``; what each does to the run and to the copies is in ``shardproof/testing/calls.py``.
"""

from shardproof.testing import Capability, Rank, contract, deadline, drawn, needs, world
from shardproof.testing.calls import Program, make_calls


@contract("DRAWN-3")
@world(2, 4)
@deadline(20)  # of one example, which takes 0.2 s
@needs(Capability.OWN_OPTIMIZER, Capability.FSDP2_API, Capability.MANUAL_RESHARD)
@drawn(program=Program)
def test_calls_of_units(rank: Rank, program: Program) -> None:
    """Calls of a model of units, in any legal order, leave it as plain copies that make the same calls."""
    make_calls(rank, program)


@contract("DRAWN-3")
@world(2, 4)
@deadline(20)
@needs(Capability.OWN_OPTIMIZER, Capability.FSDP1_API, Capability.SUMMON_FULL_PARAMS)
@drawn(program=Program)
def test_calls_of_wrappers(rank: Rank, program: Program) -> None:
    """Calls of a wrapped model, in any legal order, leave it as plain copies that make the same calls."""
    make_calls(rank, program)
