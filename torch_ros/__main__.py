"""`python -m torch_ros`: the same as `torch-ros`."""

import sys

from torch_ros.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
