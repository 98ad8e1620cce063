#!/bin/bash
# Whether each rollout of a job uses a version; the exit code is 0 if all do:
#
#     deploy/slurm/ready.sh JOB [--behind K]
set -euo pipefail
job=$1
shift
components=$(squeue --noheader --jobs="$job" --format=%A | paste -sd,)
status=0
while read -r replica node; do
  printf '%s on %s: ' "$replica" "$node"
  srun --quiet --jobid="$job" --het-group=1 --overlap --nodes=1 --ntasks=1 --nodelist="$node" \
    torch-ros ready --model "${TORCH_ROS_MODEL:-policy}" --replica "$replica" "$@" < /dev/null \
    || status=1
done < <(squeue --noheader --steps --jobs="$components" --format='%j %N' | grep ^rollout-)
exit $status
