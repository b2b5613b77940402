#!/usr/bin/env python3
"""Start Neso with the options of TensorRT-LLM's launch_triton_server.py, and return when its processes are started.

Usage: python3 scripts/launch_triton_server.py --world_size=4 --model_repo=PATH. `--help` lists the options.
`neso launch` is the same command; it stays in the foreground.
"""

import sys

from neso.cli.main import main

sys.argv[1:1] = ["launch", "--background"]
main()
