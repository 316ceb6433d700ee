#!/bin/bash
# bash job.sh: ranks on machines that let you in by ssh, without a scheduler; on this one alone if site.toml names none.
set -euo pipefail
@prepare@
cd @course@
source .venv/bin/activate

mpiexec -n @ranks@ @hosts@ --bind-to none @network@ -x PATH python @program@
