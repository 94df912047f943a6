"""Settings for all tests.

Hypothesis has no deadline per example: on a busy machine that measures the machine, not the code.
"""

import os
import signal
import sys

from hypothesis import settings

# The tests connect only to this machine, so a proxy of the environment would be in the way.
for name in [*os.environ]:
    if name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
        del os.environ[name]

# The profiles of the user name clusters that do not concern the tests.
os.environ["HOLDFAST_PROFILES"] = os.devnull + "/none"

# Tests start hundreds of processes: without compiled files, a node starts half a second later.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Programs in the background of a shell script ignore Ctrl-C, and so would the programs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.limits", "tests.slow"]

settings.register_profile("holdfast", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=20)  # `make quick` must finish soon.
settings.load_profile("holdfast")
