#!/bin/bash
#SBATCH --job-name=shardproof
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=02:00:00
#SBATCH --output=shardproof-%j.txt
#
# One torchrun on each node, one rank on each GPU:
#
#     sbatch slurm.sh [PATH OR NODE ID ...] [OPTIONS OF SHARDPROOF]
#
# The clone or environment with shardproof has the same path on all nodes, and the job is submitted there.

set -euo pipefail

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${hosts%%$'\n'*}
arguments=("$@")
if ((${#arguments[@]} == 0)); then
    arguments=(--impl torch.fully_shard)
fi

# Cases about checkpoints need a directory that all nodes see, with a short path.
if [[ -n "${SHARED_TMPDIR:-}" ]]; then
    export TMPDIR="$SHARED_TMPDIR"
fi

# The interface between the nodes, where it is not the one of the nodes' names: export GLOO_SOCKET_IFNAME=ib0
# NCCL finds its own; NCCL_SOCKET_IFNAME chooses another.

# The key of the job is in a file of the home directory. Where nodes share none: export SHARDPROOF_SECRET, the same on all.

# --kill-on-bad-exit=0: if one node fails, the others still report what they can.
exec srun --kill-on-bad-exit=0 torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" \
    --nproc-per-node="$SLURM_GPUS_ON_NODE" \
    --max-restarts=1 \
    --rdzv-backend=c10d \
    --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-endpoint="$first:29400" \
    -m shardproof run "${arguments[@]}" --report "$SLURM_SUBMIT_DIR/run-$SLURM_JOB_ID.json"
