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
# Members know one another by a CA of their own, so no client passes for one.
for ca in ca peer-ca; do
  [ -f $ca.crt ] || quiet openssl req -x509 $new_key -days 3650 -subj "/CN=$release etcd $ca" \
    -keyout $ca.key -out $ca.crt
done

names=
for member in 0 1 2; do names=$names${names:+,}DNS:$release-etcd-$member.$release-etcd; done

certificate() { # NAME CA USES [NAMES]
  [ -f "$1.crt" ] && return
  # The name must not be that of a user: etcd takes a certificate for a login if there is no other.
  quiet openssl req $new_key -subj "/CN=torch-ros $1" -keyout "$1.key" -out "$1.csr"
  printf 'extendedKeyUsage=%s\n' "$3" > "$1.ext"
  [ -z "${4-}" ] || printf 'subjectAltName=%s\n' "$4" >> "$1.ext"
  quiet openssl x509 -req -days 365 -in "$1.csr" -extfile "$1.ext" \
    -CA "$2.crt" -CAkey "$2.key" -CAcreateserial -out "$1.crt"
  rm "$1.csr" "$1.ext"
}
# etcd's gateway for JSON calls its own server, with the server's certificate.
certificate server ca serverAuth,clientAuth "DNS:localhost,$names"
certificate client ca clientAuth
certificate peer peer-ca serverAuth,clientAuth "$names"
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
secret "$release-etcd-peer" ca.crt peer-ca.crt tls.crt peer.crt tls.key peer.key
secret "$release-etcd-client" ca.crt ca.crt tls.crt client.crt tls.key client.key
secret "$release-etcd-root" password root.password
secret "$release-etcd-model" password model.password
