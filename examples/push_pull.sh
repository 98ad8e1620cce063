#!/usr/bin/env bash
# A checkpoint on disk becomes a version, which rollouts cannot tell from a trainer's, and a version
# becomes a checkpoint:
#   examples/push_pull.sh [FOLDER]       of safetensors; without: one with random weights
set -euo pipefail

directory=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$directory"' EXIT
model=push-pull-$$
checkpoint=${1:-$directory/checkpoint}

if [ $# = 0 ]; then
    mkdir "$checkpoint"
    python - "$checkpoint/model.safetensors" <<'END'
import sys
import torch
from safetensors.torch import save_file

save_file({f"layers.{n}.weight": torch.randn(512, 512).bfloat16() for n in range(8)}, sys.argv[1])
END
fi

if [ "${TORCH_ROS_ENDPOINT:-local}" = local ]; then   # tools find an etcd, and start none
    python -m torch_ros.store.local start
fi
# It stays for ten minutes, or until it is told to end: its readers read the file's own pages.
python -m torch_ros push "$checkpoint" --model "$model" --version 1 --hold 600 &
publisher=$!

python -m torch_ros pull "$model" latest "$directory/safetensors" --timeout 60
python -m torch_ros pull "$model" latest "$directory/dcp" --format dcp     # for dcp.load
python -m torch_ros --json ls "$model"
python -m torch_ros diff "$model" 1 "$directory/safetensors"               # fails if a bit differs

kill "$publisher"   # it lets readers finish, and leaves
wait "$publisher"
