"""The old place of `wassail.certificates.search.workers`."""

import warnings
from typing import Any

from wassail.certificates.search import workers


def __getattr__(name: str) -> Any:
    value = getattr(workers, name)
    warnings.warn(
        f"wassail.certificates.parallel.{name} is now wassail.certificates.search.workers.{name}.",
        DeprecationWarning,
        stacklevel=2,
    )
    return value
