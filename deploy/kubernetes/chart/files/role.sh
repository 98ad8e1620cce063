# A user of etcd for one model, who may use its keys and no others. Repeating it is safe.
set -eu
root() { ETCDCTL_USER=root ETCDCTL_PASSWORD=$(cat "$ROOT_PASSWORD_FILE") etcdctl "$@"; }
# One member is enough. With users, and without certificates, it answers only them.
until said=$({ etcdctl endpoint health || root endpoint health; } 2>&1) || true
  echo "$said" | grep -q 'is healthy'
do
  echo "$said" >&2
  sleep 2
done

if said=$(root user list 2>&1); then
  ask() { root "$@"; }
elif echo "$said" | grep -q 'authentication is not enabled'; then  # it has no users yet
  ask() { etcdctl "$@"; }
else
  echo "$said" >&2
  exit 1
fi
has() { ask "$1" get "$2" > /dev/null 2>&1; }

has user root || ask user add root --interactive=false < "$ROOT_PASSWORD_FILE"
has role root || ask role add root
ask user grant-role root root

has user "$MODEL_USER" || ask user add "$MODEL_USER" --interactive=false < "$PASSWORD_FILE"
ask user passwd "$MODEL_USER" --interactive=false < "$PASSWORD_FILE"
has role "ros-$MODEL" || ask role add "ros-$MODEL"
# After the model's own: torch's store, torchrun's rendezvous, and its workers, if they bear this name.
job="/torch-ros-store/torchrun%2F$MODEL"
for prefix in "/torch-ros/$MODEL/" "/torch-ros-store/$MODEL/" "$job/" "$job%2F"; do
  ask role grant-permission "ros-$MODEL" --prefix=true readwrite "$prefix"
done
# Without an end, the name is also the beginning of other models' names.
ask role revoke-permission "ros-$MODEL" --prefix=true "$job" > /dev/null 2>&1 || true
ask user grant-role "$MODEL_USER" "ros-$MODEL"
ask auth enable
