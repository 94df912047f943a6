"""Settings for all tests.

Hypothesis has no deadline per example: on a busy machine that measures the machine, not the code.
"""

from hypothesis import settings

settings.register_profile("holdfast", deadline=None)
settings.load_profile("holdfast")
