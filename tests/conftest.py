"""Settings for all tests.

Hypothesis has no deadline per example: on a busy machine that measures the machine, not the code.
"""

import os
import sys

from hypothesis import settings

# Everything the tests speak to is on this machine, so a proxy of the environment is in the way.
for name in [*os.environ]:
    if name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
        del os.environ[name]

# Tests start hundreds of processes: without compiled files, a node spends half a second more on its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

pytest_plugins = ["tests.limits", "tests.slow"]

settings.register_profile("holdfast", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=20)  # `make quick` wants an answer soon.
settings.load_profile("holdfast")
