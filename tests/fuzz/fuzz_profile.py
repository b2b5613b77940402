"""Number of examples per fuzz test.

NESO_FUZZ_EXAMPLES sets the number: 40 by default, thousands for a long run.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("NESO_FUZZ_EXAMPLES", "40"))

fuzz_settings = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,
        HealthCheck.data_too_large,
    ],
    print_blob=True,
)
