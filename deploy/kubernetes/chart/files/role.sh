# A user of etcd for one model, who may use its keys and no others. Repeating it is safe.
set -eu
root() { ETCDCTL_USER=root ETCDCTL_PASSWORD=$(cat "$ROOT_PASSWORD_FILE") etcdctl "$@"; }
# One member is enough. With users, and without certificates, it answers only them.
until { etcdctl endpoint health; root endpoint health; } 2>&1 | grep -q 'is healthy'; do
  sleep 2
done

if root user list > /dev/null 2>&1; then  # etcd refuses a login before it has users
  ask() { root "$@"; }
else
  ask() { etcdctl "$@"; }
fi
has() { ask "$1" get "$2" > /dev/null 2>&1; }

has user root || ask user add root --interactive=false < "$ROOT_PASSWORD_FILE"
has role root || ask role add root
ask user grant-role root root

has user "$MODEL_USER" || ask user add "$MODEL_USER" --interactive=false < "$PASSWORD_FILE"
ask user passwd "$MODEL_USER" --interactive=false < "$PASSWORD_FILE"
has role "ros-$MODEL" || ask role add "ros-$MODEL"
# The last two are those of torch's store and of torchrun's rendezvous, if they bear this name.
for prefix in "/torch-ros/$MODEL/" "/torch-ros-store/$MODEL/" "/torch-ros-store/torchrun%2F$MODEL"; do
  ask role grant-permission "ros-$MODEL" --prefix=true readwrite "$prefix"
done
ask user grant-role "$MODEL_USER" "ros-$MODEL"
ask auth enable
