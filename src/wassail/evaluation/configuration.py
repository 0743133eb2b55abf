"""What a run directory says about the run, written and read: model, data, settings, versions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from wassail.evaluation.boxes import BOXES, boxes_digest
from wassail.evaluation.chunks import plain
from wassail.evaluation.criterion import read_criterion
from wassail.evaluation.plan import data_hash
from wassail.evaluation.settings import Settings
from wassail.network import device_of, versions
from wassail.threat import Threat, parse_label_cost, parse_subpopulation
from wassail.transport.allocation import groups_of
from wassail.zoo.features import own_model
from wassail.zoo.samples import Data
from wassail.zoo.source import Source
from wassail.zoo.weights import fingerprint

FORMAT = 1  # of the run directory; a reader refuses what it does not know


def run_config(
    settings: Settings, source: Source, data: Data, mu: Tensor | None, others: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that the results depend on, as the run directory keeps it.

    Args:
        settings: of the evaluation.
        source: the model.
        data: the samples.
        mu: their weights; None for equal ones.
        others: `label_cost`, `subpopulation` and `groups`; empty where inputs move and nothing
            else.
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
    kept = {}
    if others:
        cost, groups = others["label_cost"], others["groups"]
        kept["others"] = {
            "label_cost": None if cost == math.inf else cost,
            "subpopulation": others["subpopulation"],
            "groups": groups
            and {key: list(getattr(groups, key)) for key in ("ids", "low", "high")},
        }
    return {
        "format": FORMAT,
        "model": model,
        "data": about,
        "classes": None if data.classes is None else list(data.classes),
        "norm": f"{settings.norm:g}",
        "domain": None if settings.domain is None else list(settings.domain),
        "threats": [
            {"order": f"{t.order:g}" if t.order == math.inf else t.order, "eps": t.eps}
            for t in settings.threats
        ],
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
        **kept,
    }


def read_settings(config: Mapping[str, Any]) -> Settings:
    """The settings that `run_config` wrote, as far as attacks are concerned; samples may have boxes
    beside it.

    config: of any origin.
    """
    box = config["domain"]
    kept = ("seed", "batch_size", "gradients", "look")
    return Settings(
        tuple(
            Threat(config["norm"], item["order"], item["eps"], None if box is None else tuple(box))
            for item in config["threats"]
        ),
        attacks_of(config),
        criterion=read_criterion(config),
        chunk=int(config["chunk"]),
        **{name: config[name] for name in kept if name in config},
    )


def attacks_of(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The attacks that a run was made with, and the options of each."""
    return {
        str(entry["name"]): {k: v for k, v in entry.items() if k != "name"}
        for entry in config["attacks"]
    }


def read_others(config: Mapping[str, Any], n: int) -> dict[str, Any]:
    """The labels that change and other people that `run_config` wrote.

    n: how many samples it has.
    """
    kept = config.get("others")
    if kept is None:
        return {}
    cost = kept["label_cost"]
    return {
        "label_cost": math.inf if cost is None else parse_label_cost(cost),
        "subpopulation": parse_subpopulation(kept["subpopulation"]),
        "groups": groups_of(kept["groups"], n),
    }
