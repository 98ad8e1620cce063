#!/usr/bin/env bash
# An elastic torchrun job of two nodes, here two processes of this machine, and a rollout that
# follows it. One node is killed, and another one takes its place. The trainers go on with the
# weights that the rollout still has: nothing is written to a disk. Takes half a minute.
#
# etcd is that of TORCH_ROS_ENDPOINT, or else "local": found on this host, or started.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
[ -x "$python" ] || python=python3
cd examples/elastic

export TORCH_ROS_ENDPOINT=${TORCH_ROS_ENDPOINT:-local} OMP_NUM_THREADS=1
export TORCH_ROS_MODEL=elastic-$$-$RANDOM
steps=8
logs=$(mktemp -d)
export TMPDIR=$logs # torchrun leaves directories behind

node() { # NAME: what one starts on each machine of the job
  exec "$python" -m torch.distributed.run \
    --rdzv-backend=torch-ros --rdzv-endpoint="$TORCH_ROS_ENDPOINT" --rdzv-id="$TORCH_ROS_MODEL" \
    --rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3 \
    --nnodes=1:2 --nproc-per-node=1 --max-restarts=3 --monitor-interval=0.5 \
    train.py "$steps" > >(sed -u "s/^/node $1 | /") 2> "$logs/$1"
}

workers_of() { # PID: torchrun's children
  cat /proc/"$1"/task/*/children
}

end() {
  status=$?
  trap - EXIT
  [ $status = 0 ] || tail -n 40 "$logs"/*
  for pid in $(jobs -p); do
    kill -9 $(workers_of "$pid" 2> /dev/null) "$pid" 2> /dev/null || true
  done
  rm -rf "$logs"
  exit $status
}
trap end EXIT

node one &
node two & two=$!

exec 3< <(exec "$python" rollout.py "$steps" 2> "$logs/rollout")
rollout=$!
while read -r line <&3; do
  echo "rollout  | $line"
  if [ "$line" = "has version 3" ]; then
    echo "         | kill -9: node two, and what it runs"
    kill -9 "$two" $(workers_of "$two")
    wait "$two" 2> /dev/null || true
    node three & three=$!
  fi
done

wait "$rollout" # each ends the script if it failed
wait %1
wait "$three"
echo "version $steps was reached, from what the rollout kept"
