#!/bin/bash
# sbatch job.sh: ranks that Open MPI's mpiexec starts on the nodes of a Slurm job.
#SBATCH --job-name=dtlib
#SBATCH --nodes=@nodes@
#SBATCH --ntasks=@ranks@
#SBATCH --ntasks-per-node=@ranks_a_node@
#SBATCH --time=@minutes@
@account@
@queue@
@gpus@
set -euo pipefail
@prepare@
cd @course@
source .venv/bin/activate
export OMP_NUM_THREADS=$(( ${SLURM_CPUS_ON_NODE:-@ranks_a_node@} / @ranks_a_node@ ))

mpiexec -n @ranks@ --bind-to none @network@ -x PATH -x OMP_NUM_THREADS python @program@
