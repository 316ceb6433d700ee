#!/bin/bash -l
# qsub job.sh: ranks on the nodes of a PBS job; the resources are those of Polaris, at Argonne.
#PBS -N dtlib
#PBS -l select=@nodes@:ncpus=@ranks_a_node@:mpiprocs=@ranks_a_node@@gpus@
#PBS -l place=scatter
#PBS -l walltime=@walltime@
@filesystems@
@account@
@queue@
set -euo pipefail
@prepare@
cd @course@
source .venv/bin/activate
export OMP_NUM_THREADS=$(( $(nproc) / @ranks_a_node@ ))
agent=$(command -v pbs_tmrsh || command -v ssh)

mpiexec -n @ranks@ --hostfile "$PBS_NODEFILE" --prtemca plm_ssh_agent "$agent" --bind-to none @network@ \
    -x PATH -x OMP_NUM_THREADS python @program@
