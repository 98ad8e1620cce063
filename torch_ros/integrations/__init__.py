"""One file per engine or framework that torch_ros works inside of. None yet."""
