#!/bin/bash
# sbatch job.sh: one torchrun a node, which starts the ranks there. No MPI: ranks meet at a port of the first node.
#SBATCH --job-name=dtlib
#SBATCH --nodes=@nodes@
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=@ranks_a_node@
#SBATCH --time=@minutes@
@account@
@queue@
@gpus@
set -euo pipefail
@prepare@
cd @course@
source .venv/bin/activate
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # since Slurm 22.05 srun does not inherit it
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun torchrun --nnodes=@nodes@ --nproc-per-node=@ranks_a_node@ --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-backend=c10d --rdzv-endpoint="$first:29500" @program@
