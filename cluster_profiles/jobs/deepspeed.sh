#!/bin/bash
# bash job.sh: DeepSpeed's launcher, which reaches the machines by ssh (pdsh) and starts no MPI.
set -euo pipefail
@prepare@
cd @course@
source .venv/bin/activate
printf '%s\n' @hostlines@ > hostfile

deepspeed --hostfile hostfile --num_nodes @nodes@ --num_gpus @ranks_a_node@ @program@
