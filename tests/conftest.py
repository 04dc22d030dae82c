"""Property tests draw the same examples every time, so that a run proves a commit and not its luck.

`make fuzz` draws new ones: what it finds becomes an `@example`.
"""

import os

from hypothesis import settings

settings.register_profile("everyday", derandomize=True)
settings.register_profile("fuzz", derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "everyday"))
