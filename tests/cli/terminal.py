"""`torch-ros top` as a process on a terminal."""

import os
import pty
import subprocess
import sys
import termios


def drawn(endpoint, model, words, *options, **environment):
    """Its exit code, after it has drawn `words` and heard `q`."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (24, 80))
    command = [sys.executable, "-m", "torch_ros", "--endpoint", endpoint, "top", model, *options]
    environment = {**os.environ, "TERM": "xterm", **environment}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while words not in shown:
                shown += os.read(ours, 65536)
        except BaseException:  # or it would wait for ever for somebody who looks
            process.kill()
            raise
        os.write(ours, b"q")
        try:
            while os.read(ours, 65536):
                pass
        except OSError:  # nobody has the other end any more
            pass
    os.close(ours)
    return process.returncode
