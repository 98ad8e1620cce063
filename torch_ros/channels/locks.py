"""The lock of whoever calls OpenSSL, in each of its modules: `ssl`, `hmac`, `cryptography`."""

import os
import threading

# OpenSSL has locks that a forked child could never take, if another thread of its parent had them.
openssl: threading.RLock = threading.RLock()
os.register_at_fork(
    before=openssl.acquire, after_in_parent=openssl.release, after_in_child=openssl.release
)
