"""`python -m torch_ros`: the same as `torch-ros`."""

import sys

from torch_ros.cli.main import main

sys.exit(main())
