"""What a run directory says about the run: model, data, threats, attacks, versions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wassail.evaluation.boxes import BOXES, boxes_digest
from wassail.evaluation.chunks import plain
from wassail.evaluation.plan import data_hash, threat_config
from wassail.evaluation.reading import FORMAT
from wassail.evaluation.settings import Settings
from wassail.network import device_of, versions
from wassail.zoo.features import own_model
from wassail.zoo.samples import Data
from wassail.zoo.source import Source
from wassail.zoo.weights import fingerprint


def run_config(settings: Settings, source: Source, data: Data, mu: Tensor | None) -> dict[str, Any]:
    """Everything that the results depend on, as the run directory keeps it.

    Args:
        settings: of the evaluation.
        source: the model.
        data: the samples.
        mu: their weights; None for equal ones.
    """
    model = {
        "name": source.name,
        "kind": source.kind,
        "weights": fingerprint(own_model(source.model)),
        **plain(dict(source.info)),
    }
    about = {
        "name": data.name,
        "samples": len(data),
        "shape": list(data.shape),
        **plain(dict(data.info)),
    }
    certify: dict[str, Any] | None = None
    if settings.certify is not None:
        certify = {
            "method": settings.certify,
            "arithmetic": settings.arithmetic,
            "time_limit": settings.time_limit,
        }
        asked = {name: getattr(settings, name) for name in ("gap", "closing", "effort")}
        certify |= {name: value for name, value in asked.items() if value is not None}
    return {
        "format": FORMAT,
        "model": model,
        "data": about,
        "classes": None if data.classes is None else list(data.classes),
        **threat_config(settings.threats),
        "attacks": [
            {"name": name, **plain(dict(options))} for name, options in settings.attacks.items()
        ],
        "certify": certify,
        "seed": settings.seed,
        "chunk": settings.chunk,
        "batch_size": settings.batch_size,
        "gradients": settings.gradients,
        "look": settings.look,
        "mu": None if mu is None else data_hash(mu, mu),
        **({} if settings.criterion is None else {"criterion": settings.criterion.config}),
        **({} if settings.boxes is None else {BOXES: boxes_digest(settings.boxes)}),
        "device": device_of(source.model, torch.device("cpu")).type,
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
