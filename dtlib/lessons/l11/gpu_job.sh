#!/bin/bash
#SBATCH --nodes=2                  # two machines
#SBATCH --ntasks-per-node=1        # one torchrun on each; torchrun starts the ranks
#SBATCH --gpus-per-node=4          # without this line: no GPU, and training on the CPU
#SBATCH --cpus-per-task=32         # for a torchrun: 4 ranks with 8 cores each
#SBATCH --mem=0                    # all memory of the machines
#SBATCH --time=00:30:00            # hours:minutes:seconds; then the job is killed
#SBATCH --requeue                  # after a broken machine, start again
#SBATCH --output=train-%j.log      # %j is the number of the job
set -euo pipefail                  # end at the first error
cd "$SLURM_SUBMIT_DIR"             # a folder that all machines see
source .venv/bin/activate          # the environment, in that folder
export OMP_NUM_THREADS=8           # threads of a rank; torchrun sets 1 otherwise
export NCCL_SOCKET_IFNAME=ib0      # NCCL's TCP: not over the network for logins
export SRUN_CPUS_PER_TASK=32       # since Slurm 22.05 srun ignores --cpus-per-task above
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)  # the first machine
srun torchrun --nnodes=2 --nproc-per-node=4 `# srun: on both machines` \
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d `# one id for all ranks` \
    --rdzv-endpoint="$first:29500" `# where all ranks connect` \
    train.py --resume checkpoints  # continue from the last checkpoint, if there is one
