"""One door to every engine that looks for the nearest flip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from wassail.attacks.wda_pp import flips_wda_pp
from wassail.errors import InputError, unknown
from wassail.network import Model
from wassail.threat import Domain, Number
from wassail.transport import Flips

ENGINES: dict[str, Callable[..., Flips]] = {"wda++": flips_wda_pp}


def nearest(
    model: Model,
    x: Tensor,
    y: Tensor,
    norm: Number = "inf",
    domain: Domain = (0.0, 1.0),
    method: str = "wda++",
    *,
    seed: int = 0,
    **options: Any,
) -> Flips:
    """The nearest flip that an engine finds for each sample.

    model: batch `(n, *shape)` -> logits `(n, K)`; x `(N, *shape)` in the domain, y `(N,)`. method: the engine; its keyword
    arguments pass through: for "wda++" `step` or `eps` (one is required), `steps`, `topk`, `search`, `select`.
    """
    if method not in ENGINES:
        raise unknown("method", method, ENGINES)
    try:
        return ENGINES[method](model, x, y, norm, domain, seed=seed, **options)
    except TypeError as error:
        if "keyword argument" in str(error) and method in str(error).replace("flips_wda_pp", "wda++"):
            raise InputError(f"{error}; see help(wassail.nearest) for what {method!r} takes.") from None
        raise
