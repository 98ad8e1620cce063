# An etcd of this job's own, on its first node. job.sbatch sources it.
#
# Who can read etcd can read the weights, and a cluster has other users: it takes no client without
# the job's certificate, which signs itself. Its key is in a folder of this user alone.
address=$(scontrol --oneliner show node "$SLURMD_NODENAME" | sed 's/.* NodeAddr=\([^ ]*\).*/\1/')
port=$((10000 + SLURM_JOB_ID % 10000 * 2))
records=$(mktemp --directory --tmpdir "torch-ros-$SLURM_JOB_ID-XXXX") # TMPDIR, on the node itself
keys=$PWD/torch-ros-$SLURM_JOB_ID                                     # all nodes read it

kind=DNS listen=0.0.0.0
[[ $address =~ ^[0-9.]+$ ]] && kind=IP listen=$address
rm -rf "$keys"
mkdir -m 700 "$keys"
export TORCH_ROS_ETCD_CERT=$keys/crt TORCH_ROS_ETCD_KEY=$keys/key TORCH_ROS_ETCD_CA=$keys/crt
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 \
  -subj "/CN=torch-ros $SLURM_JOB_ID" -addext "subjectAltName=$kind:$address" \
  -keyout "$TORCH_ROS_ETCD_KEY" -out "$TORCH_ROS_ETCD_CERT" 2> "$keys/log"

peer=https://127.0.0.1:$((port + 1)) # itself, alone
export TORCH_ROS_ENDPOINT=etcds://$address:$port
serve() { # records end with the job: no fsync
  trap 'kill "$etcd"; wait "$etcd"; exit' TERM
  while :; do
    etcd --data-dir="$records" --unsafe-no-fsync --log-level=warn \
      --listen-client-urls="https://$listen:$port" \
      --advertise-client-urls="https://$address:$port" \
      --listen-peer-urls="$peer" --initial-advertise-peer-urls="$peer" \
      --initial-cluster="default=$peer" --client-cert-auth --peer-client-cert-auth \
      --cert-file="$keys/crt" --key-file="$keys/key" --trusted-ca-file="$keys/crt" \
      --peer-cert-file="$keys/crt" --peer-key-file="$keys/key" --peer-trusted-ca-file="$keys/crt" \
      --auto-compaction-mode=periodic --auto-compaction-retention=1m \
      --quota-backend-bytes=4294967296 & etcd=$!
    wait "$etcd" || sleep 1
  done
}
serve & serving=$!
trap 'kill "$serving" && wait "$serving" || true; rm -rf "$records" "$keys"' EXIT
