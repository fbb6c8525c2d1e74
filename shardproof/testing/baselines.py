"""What a run is compared with besides a pair's baseline: plain copies, twins, the oracle, state dicts."""

from shardproof.harness.casework import states as states
from shardproof.harness.casework.baselines import Undivided as Undivided
from shardproof.harness.casework.baselines import backward_of_copies as backward_of_copies
from shardproof.harness.casework.baselines import check_gradients as check_gradients
from shardproof.harness.casework.baselines import check_parameters as check_parameters
from shardproof.harness.casework.twins import check_exact as check_exact
from shardproof.harness.judging.numerics import distance as distance
from shardproof.harness.parity.oracle import Oracle as Oracle
from shardproof.harness.parity.run import StepPicture as StepPicture
