"""`python -m torch_ros`, and `torch-ros`: the program, from its first moment on."""

import os
import sys

INTERRUPTED = 130  # as in cli/main.py, which may not be there yet


def main() -> int:
    """Run the command of this process's arguments; returns its exit code."""
    try:
        if "_ARGCOMPLETE" in os.environ:
            from torch_ros.cli import completing  # noqa: PLC0415

            return completing.complete()
        # feature installs {
        if sys.argv[1:2] == ["ready"]:  # a probe: the other commands take longer to import
            from torch_ros.cli import ready  # noqa: PLC0415

            return ready.main()
        # } installs
        from torch_ros.cli import main as commands  # noqa: PLC0415  # Ctrl-C may come meanwhile

        return commands.main()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
