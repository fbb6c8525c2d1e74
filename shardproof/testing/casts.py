"""The baseline of runs in low precision: a full copy on every rank, in which each cast and each sum is written out."""

from shardproof.harness.casework.casts import CastReplica as CastReplica
from shardproof.harness.casework.casts import check_equal as check_equal
from shardproof.harness.casework.casts import check_evaluation as check_evaluation
from shardproof.harness.casework.casts import check_statistics as check_statistics
from shardproof.harness.casework.casts import run_and_replica as run_and_replica
from shardproof.harness.casework.casts import step_and_check as step_and_check
