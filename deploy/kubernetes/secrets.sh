#!/bin/sh
# Certificates and passwords for the etcd of a release, as Secrets of Kubernetes on stdout:
#
#     ./secrets.sh torch-ros keys | kubectl apply --namespace torch-ros -f -
#
# The folder keeps them: run again, it makes only what is not there. Keep it as you keep keys.
set -eu
umask 077
release=$1 folder=$2
mkdir -p "$folder"
cd "$folder"

quiet() {
  "$@" 2> log || { cat log >&2; exit 1; }
  rm log
}
new_key="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
[ -f ca.crt ] || quiet openssl req -x509 $new_key -days 3650 -subj "/CN=$release etcd CA" \
  -keyout ca.key -out ca.crt

names=DNS:localhost,IP:127.0.0.1
for member in 0 1 2; do names=$names,DNS:$release-etcd-$member.$release-etcd; done
for name in server client; do
  [ -f $name.crt ] && continue
  # The name must not be that of a user: etcd takes a certificate for a login if there is no other.
  quiet openssl req $new_key -subj "/CN=torch-ros $name" -keyout $name.key -out $name.csr
  echo "subjectAltName=$names" > $name.san
  quiet openssl x509 -req -days 365 -in $name.csr -extfile $name.san \
    -CA ca.crt -CAkey ca.key -CAcreateserial -out $name.crt
  rm $name.csr $name.san
done
for name in root model; do
  [ -f $name.password ] || openssl rand -hex 24 > $name.password
done

secret() { # NAME KEY FILE [KEY FILE]...
  printf -- '---\napiVersion: v1\nkind: Secret\nmetadata: {name: %s}\ndata:\n' "$1"
  shift
  while [ $# -gt 0 ]; do
    printf '  %s: %s\n' "$1" "$(base64 < "$2" | tr -d '\n')"
    shift 2
  done
}
secret "$release-etcd-server" ca.crt ca.crt tls.crt server.crt tls.key server.key
secret "$release-etcd-client" ca.crt ca.crt tls.crt client.crt tls.key client.key
secret "$release-etcd-root" password root.password
secret "$release-etcd-model" password model.password
