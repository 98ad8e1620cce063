import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # so that tests find the simulator's modules
