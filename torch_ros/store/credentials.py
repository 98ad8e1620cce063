"""Who this process is to etcd: the files of TLS, and a user; none of them is asked."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from torch_ros.errors import UsageError


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files, by their paths; "" is none. Read once, when an `EtcdKV` is made."""

    ca: str = ""  # who may have signed etcd's certificate; none: the authorities that grpc brings
    cert: str = ""  # ours, if etcd asks for one; with those that lead from it to the CA
    key: str = ""  # of `cert`, not encrypted


@dataclass(frozen=True, slots=True)
class User:
    """A user of etcd. The password stays in its file, and is read for each login."""

    name: str
    password_file: str


def pem_of(tls: Tls) -> tuple[bytes | None, bytes | None, bytes | None]:
    """The content of its files: of the CA, of the key and of the certificate.

    Raises: UsageError: One of them cannot be used; gRPC would only say so at the first call.
    """
    if bool(tls.cert) != bool(tls.key):
        raise UsageError(
            "a client certificate and its key belong together, and only one of them was named; "
            "set both of TORCH_ROS_ETCD_CERT and TORCH_ROS_ETCD_KEY, or neither"
        )
    ca, cert, key = (bytes_of(path) if path else None for path in (tls.ca, tls.cert, tls.key))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if ca:
            context.load_verify_locations(tls.ca)
        if cert:
            context.load_cert_chain(tls.cert, tls.key, password="")  # or it asks at the terminal
    except (ssl.SSLError, ValueError) as error:
        named = ", ".join(path for path in (tls.ca, tls.cert, tls.key) if path)
        raise UsageError(
            f"one of {named} cannot be used: {error}; expected certificates and an unencrypted "
            "key in PEM, and the key that belongs to the certificate"
        ) from error
    return ca, key, cert


def bytes_of(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
