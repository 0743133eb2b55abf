"""Forged runs: every checksum is right, and something is not true, or not said.

`forge` writes a run anew with other numbers. `RUNS` and `SMOOTHED` are the forgeries, by name: what
changes a good folder in place, and what a reader with the model must then see: "false" (`verify`
finds it), "refused" (one sentence), or words that `verify` shows, where the figures are true under
conditions that the run chose, or where a field is not checked.
"""

import copy
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import wassail as ws
from wassail.evaluation.plan import data_hash
from wassail.evaluation.sealing import seal
from wassail.evaluation.smoothed import row_of
from wassail.evaluation.store.store import Store
from wassail.evaluation.summary import summary
from wassail.smoothing.attack import SmoothedAttack
from wassail.smoothing.model import Votes
from wassail.threat import parse_order

THREATS = [ws.Threat("inf", order, 0.05) for order in (1, "inf")]
Tensors = dict[str, torch.Tensor]
Edit = Callable[[str, Tensors, dict[str, Any]], None]
Change = Callable[[Path], Any]
Case = tuple[Change, str]


def network() -> torch.nn.Module:
    """A network of the plane; its biases make all three classes occur in the unit square."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    ).eval()
    with torch.no_grad():
        model[2].bias -= model(torch.rand(200, 2, generator=torch.Generator().manual_seed(2))).mean(
            0
        )
    return model


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(12, 2, generator=torch.Generator().manual_seed(1))
    y = network()(x).argmax(1)
    y[3] = (y[3] + 1) % 3
    return x, y


def good_run(out: Path) -> Path:
    """One chunk, so that the attack that `verify` runs again sees all samples."""
    ws.evaluate(
        network(),
        samples(),
        THREATS,
        ("fgsm", "wda", "nearest"),
        certify="auto",
        passes=30,
        landmarks="standard",
        look=False,
        out=out,
    )
    return out


def good_votes(out: Path) -> Path:
    """The files of `wassail evaluate --smooth`."""
    from wassail.cli.parser import main

    words = "evaluate digits-mlp --smooth 0.2:draws=200 -n 4 --passes 20 --order 1 --quiet"
    assert main([*words.split(), "--eps", "0.05", "0.2", "--out", str(out)]) == 0
    return out


def forge(
    folder: Path,
    edit: Edit | None = None,
    config: Callable[[dict[str, Any], dict[str, Any]], None] | None = None,
    landmarks: Callable[[list[dict[str, Any]]], None] | None = None,
) -> ws.Evaluation:
    """Write a run anew, with checksums, identity, summary and manifest to match.

    edit: of every chunk, `edit(unit, tensors, fields)`; config: of the configuration, which is also
    given the chunks by name; landmarks: of the known shifts.
    """
    reader = Store.open(folder)
    names = [
        path.relative_to(folder / "results").as_posix()
        for path in sorted((folder / "results").rglob("*.safetensors"))
    ]
    kept = {name: reader.get(name.rpartition("/")[0], int(Path(name).stem)) for name in names}
    known = reader.read("landmarks.json")
    asked = copy.deepcopy(reader.config)
    for name, (tensors, fields) in kept.items():
        if edit is not None:
            edit(name.rpartition("/")[0], tensors, fields)
    if config is not None:
        config(asked, kept)
    shutil.rmtree(folder / "results")
    (folder / "config.json").unlink()
    with Store.create(folder, asked) as store:
        for name, (tensors, fields) in kept.items():
            store.put(name.rpartition("/")[0], int(Path(name).stem), tensors, fields)
        if known is not None:
            listed = json.loads(known)
            if landmarks is not None:
                landmarks(listed)
            store.write("landmarks.json", json.dumps(listed, indent=1) + "\n")
        found = summary(ws.Evaluation.load(folder))
        store.write("summary.json", json.dumps(found, indent=1, sort_keys=True))
        store.seal()
    assert Store.open(folder).verify() == []  # nothing is wrong with the files
    return ws.Evaluation.load(folder)


def without_flips(unit: str, tensors: Tensors, fields: dict[str, Any]) -> None:
    if "distances" not in tensors:
        return
    distances = tensors["distances"]
    tensors["distances"] = torch.where(distances > 0, math.inf, 0.0).double()
    if "index" in tensors:
        tensors["index"], tensors["points"] = tensors["index"][:0], tensors["points"][:0]
    if "refuted" in tensors:
        tensors["refuted"] = torch.zeros_like(tensors["refuted"])
        tensors["found_by"] = torch.zeros_like(tensors["found_by"])


def shared(unit: str, tensors: Tensors, fields: dict[str, Any]) -> None:
    if unit.startswith("attack@wda@1"):
        fields["share"] = 0.01


def nearer(unit: str, tensors: Tensors, fields: dict[str, Any]) -> None:
    if unit.startswith(("attack@nearest", "pool", "transfer")):
        tensors["distances"] = torch.where(
            torch.isfinite(tensors["distances"]), tensors["distances"] / 2, math.inf
        )
    if unit.startswith("radii"):
        tensors["values"] = torch.zeros_like(tensors["values"])
        tensors["distances"] = torch.where(
            torch.isfinite(tensors["distances"]), tensors["distances"] / 2, math.inf
        )


def refuted(unit: str, tensors: Tensors, fields: dict[str, Any]) -> None:
    if unit.startswith("pool"):
        tensors["refuted"] = (
            (tensors["distances"] > 0)[:, None].expand_as(tensors["refuted"]).contiguous()
        )
        tensors["distances"] = torch.where(tensors["distances"] > 0, math.inf, 0.0).double()


def logits(unit: str, tensors: Tensors, fields: dict[str, Any]) -> None:
    if "logits" in tensors:
        tensors["logits"] = tensors["logits"] + 1


def other_samples(unit: str, tensors: Tensors, fields: dict[str, Any]) -> None:
    if "ids" in fields:
        fields["ids"] = ["x" + name for name in fields["ids"]]


def free(unit: str, tensors: Tensors, fields: dict[str, Any]) -> None:
    if unit.startswith("attack@nearest"):
        tensors["forwards"] = torch.zeros_like(tensors["forwards"])


def dear(unit: str, tensors: Tensors, fields: dict[str, Any]) -> None:
    if unit.startswith("attack@nearest"):
        tensors["forwards"] = tensors["forwards"] + 1000


# ---- Chunks


def chunks(where: str, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """A forgery that changes one tensor of the folders whose name begins so."""

    def edit(unit: str, tensors: Tensors, fields: dict[str, Any]) -> None:
        if unit.startswith(where) and name in tensors:
            tensors[name] = change(tensors[name])

    return lambda folder: forge(folder, edit)


def edited(*edits: Edit) -> Change:
    def edit(unit: str, tensors: Tensors, fields: dict[str, Any]) -> None:
        for one in edits:
            one(unit, tensors, fields)

    return lambda folder: forge(folder, edit)


def scaled_radii(factor: float, exact: bool) -> Edit:
    def edit(unit: str, tensors: Tensors, fields: dict[str, Any]) -> None:
        if unit.startswith("radii@"):
            tensors["values"] = tensors["values"] * factor
            tensors["exact"] = torch.full_like(tensors["exact"], exact)

    return edit


def title(unit: str, tensors: Tensors, fields: dict[str, Any]) -> None:
    if unit.startswith("attack@nearest"):
        fields["title"] = "AutoAttack, 10 restarts"


def checksum_of_samples(unit: str, tensors: Tensors, fields: dict[str, Any]) -> None:
    if unit == "clean":
        fields["sha256"] = "0" * 64


def weighted(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Other weights, without known shifts: these are for equal weights, and would contradict."""

    def edit(unit: str, tensors: Tensors, fields: dict[str, Any]) -> None:
        if unit == "clean":
            tensors["mu"] = change(tensors["mu"])

    return lambda folder: forge(folder, edit, None, list.clear)


def next_label(y: torch.Tensor) -> torch.Tensor:
    y = y.clone()
    y[0] = (y[0] + 1) % 3
    return y


def all_on_one(mu: torch.Tensor) -> torch.Tensor:
    mu = torch.zeros_like(mu)
    mu[0] = 1.0
    return mu


def one_at(place: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(old: torch.Tensor) -> torch.Tensor:
        new = old.clone()
        new[place] = value
        return new

    return change


# ---- Configurations


def configured(*path: str, value: Any) -> Change:
    """A forgery that sets one key of the configuration."""

    def change(config: dict[str, Any], kept: dict[str, Any]) -> None:
        inner = config
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return lambda folder: forge(folder, None, change)


def declared_weights(power: float) -> Change:
    """Weights that grow with the distance of the flips, and their checksum in the configuration."""

    def change(config: dict[str, Any], kept: dict[str, Any]) -> None:
        pool = next(item for name, item in kept.items() if name.startswith("pool@"))
        weight = pool[0]["distances"].clamp(max=1.0) ** power
        mu = weight / weight.sum()
        (clean,) = (item for name, item in kept.items() if name.startswith("clean/"))
        clean[0]["mu"] = mu
        config["mu"] = data_hash(mu, mu)

    return lambda folder: forge(folder, None, change, list.clear)


def more_passes(config: dict[str, Any], kept: dict[str, Any]) -> None:
    for entry in config["attacks"]:
        if entry["name"] == "nearest":
            entry["passes"] = 100_000


# ---- Known shifts


def shifts(name: str, change: Callable[[Any], Any]) -> Change:
    """A forgery of one entry of every known shift."""

    def edit(listed: list[dict[str, Any]]) -> None:
        for entry in listed:
            entry[name] = change(entry[name])

    return lambda folder: forge(folder, None, None, edit)


def halved(eps: dict[str, Any]) -> dict[str, float]:
    return {order: value / 2 for order, value in eps.items()}


# ---- Other files


def smoothing_beside(folder: Path) -> None:
    row = {"order": "1", "eps": 0.1, "vote certified": 0.999, "vote attacked": 0.999}
    row |= {"random certified": 0.999, "random attacked": 0.999, "Kumar": 0.5}
    about = {"model": "net", "sigma": 0.1, "confidence": 0.999, "rows": [row]}
    (folder / "smoothing.json").write_text(json.dumps(about))


def summarised(folder: Path) -> None:
    path = folder / "results" / "summary.json"
    path.write_text(path.read_text().replace('"headline": "Between', '"headline": "Up to 99.9 %'))
    with Store.resume(folder, Store.open(folder).config) as store:
        store.seal()


def unlisted(folder: Path) -> None:
    (folder / "results" / "extra.json").write_text("{}")


def own_page(folder: Path) -> None:
    (folder / "report.html").write_text("<h1>99.9 %</h1>")


def other_times(folder: Path) -> None:
    line = '{"event":"done","unit":"attack@nearest","chunk":0,"seconds":0.001}\n'
    with (folder / "log" / "events.jsonl").open("a") as file:
        file.write(line)


def boxed(frozen: bool) -> Change:
    """An honest run in boxes and units of its own: one of two features may not move, or both are
    measured in units that make the budget small.
    """

    def make(folder: Path) -> None:
        shutil.rmtree(folder)
        scale = [0.0, 1.0] if frozen else [5.0, 5.0]
        features = ws.Features([0.0, 0.0], [1.0, 1.0], scale, ["age", "dose"])
        model = features.model(network())
        threats = [ws.Threat("inf", order, 0.05, features.domain) for order in (1, "inf")]
        data = features.data(*samples())
        kept: dict[str, Any] = {"certify": "crown", "passes": 30, "look": False, "out": folder}
        ws.evaluate(model, data, threats, ("fgsm", "nearest"), **kept)

    return make


def own_domain(folder: Path) -> None:
    """An honest run in a box just around the samples."""
    shutil.rmtree(folder)
    x, y = samples()
    threats = [ws.Threat("inf", p, 0.05, (float(x.min()), float(x.max()))) for p in (1, "inf")]
    kept: dict[str, Any] = {"certify": "crown", "passes": 30, "look": False, "out": folder}
    ws.evaluate(network(), (x, y), threats, ("fgsm", "nearest"), **kept)


def seal_of_another(folder: Path) -> None:
    seal(folder)
    forge(folder, title)


RUNS: dict[str, Case] = {
    "all weight on one sample": (weighted(all_on_one), "false"),
    "weights that do not sum to 1": (weighted(lambda mu: mu / 2), "false"),
    "negative weights": (weighted(lambda mu: -mu), "refused"),
    "weights in another type": (weighted(lambda mu: mu.float()), "refused"),
    "declared weights": (declared_weights(1.0), "With equal weights between"),
    "declared weights, extreme": (declared_weights(12.0), "unequal weights"),
    "a frozen feature": (boxed(True), "1 may not move (age)"),
    "units that shrink the budget": (boxed(False), "in the plain box"),
    "a box around the samples": (own_domain, "in the plain box"),
    "radii doubled, flips removed": (edited(without_flips, scaled_radii(2.0, False)), "false"),
    "radii a little too large": (edited(without_flips, scaled_radii(1.01, False)), "false"),
    "smaller radii called exact": (edited(scaled_radii(0.9, True)), "false"),
    "radii of 0.9995 called exact": (edited(scaled_radii(0.9995, True)), "false"),
    "a radius where the sample is wrong": (chunks("radii@", "values", one_at(3, 0.01)), "refused"),
    "radii in another type": (chunks("radii@", "values", lambda r: r.float()), "refused"),
    "a radius that is no number": (chunks("radii@", "values", one_at(0, math.nan)), "refused"),
    "all flips deleted": (edited(without_flips), "false"),
    "a title that was not earned": (edited(title), "false"),
    "another share": (edited(shared), "false"),
    "halved distances": (edited(nearer), "false"),
    "flips called none": (edited(refuted), "false"),
    "other logits": (edited(logits), "false"),
    "other names of samples": (edited(other_samples), "false"),
    "flips that cost nothing": (edited(free), "false"),
    "more passes than given": (edited(dear), "false"),
    "other checksums of samples": (edited(checksum_of_samples), "false"),
    "other classes at the flips": (chunks("", "labels", lambda y: (y + 1) % 3), "false"),
    "other predictions": (chunks("clean", "predicted", one_at(0, 2)), "false"),
    "other labels": (chunks("clean", "y", next_label), "false"),
    "other samples": (chunks("clean", "x", lambda x: (x + 0.003).clamp(0, 1)), "false"),
    "samples that are truth values": (chunks("clean", "x", lambda x: x > 0.5), "refused"),
    "points outside the box": (chunks("attack@nearest", "points", lambda x: x - 2), "false"),
    "points that are no numbers": (chunks("attack@fgsm", "points", lambda x: x / 0), "false"),
    "another finder of the flips": (chunks("pool", "found_by", lambda k: k * 0), "false"),
    "known shifts at 100 %": (shifts("accuracy", lambda old: 1.0), "false"),
    "known shifts that cost half": (shifts("eps", halved), "false"),
    "exact costs that are none": (shifts("exact", lambda old: dict.fromkeys(old, 0.5)), "false"),
    "a shift of its own": (shifts("name", lambda old: f"my {old}"), "they are no known ones"),
    "shifts of another norm": (shifts("norm", lambda old: "2"), "refused"),
    "another model": (configured("model", "weights", value="ab" * 32), "false"),
    "other data": (configured("data", "sha256", value="ab" * 32), "false"),
    "another source of the data": (configured("data", "source", value="builtin"), "false"),
    "a split of its own": (configured("data", "split", value="test"), "config.data.split"),
    "names of classes": (configured("classes", value=["a", "b", "c"]), "config.classes"),
    "another norm": (configured("norm", value="2"), "refused or false"),
    "a narrower box": (configured("domain", value=[0.2, 0.8]), "refused or false"),
    "other versions": (configured("versions", value={"wassail": "9.9"}), "config.versions"),
    "another name": (configured("model", "name", value="certified 99 %"), "name"),
    "another command": (configured("command", value=["; rm -rf ~"]), "config.command"),
    "an attack that worked harder": (
        lambda folder: forge(folder, None, more_passes),
        "config.attacks",
    ),
    "results of another kind beside it": (smoothing_beside, "refused"),
    "a summary of its own": (summarised, "false"),
    "a file that is not listed": (unlisted, "false"),
    "a page of its own": (own_page, "file report.html"),
    "other times": (other_times, "rows.seconds"),
}


# ---- Smoothed models


def refigured(folder: Path, votes: Votes, attack: SmoothedAttack, **about: Any) -> None:
    """Write votes and attack, and every figure that follows from them."""
    votes.save(folder / "votes.safetensors")
    attack.save(folder / "attack.safetensors")
    stated = json.loads((folder / "smoothing.json").read_text()) | about
    proof = votes.certificate(stated["confidence"])
    stated["rows"] = [
        row_of(proof, attack, row["eps"], parse_order(row["order"])) for row in stated["rows"]
    ]
    (folder / "smoothing.json").write_text(json.dumps(stated, indent=1))


def voted(**changes: Callable[[Any], Any]) -> Change:
    """A forgery of fields of the votes, or with `attack_` before it of the attack."""

    def change(folder: Path) -> None:
        votes = Votes.load(folder / "votes.safetensors")
        attack = SmoothedAttack.load(folder / "attack.safetensors")
        told: dict[str, Any] = {}
        for name, make in changes.items():
            record, key = (attack, name[7:]) if name.startswith("attack_") else (votes, name)
            object.__setattr__(record, key, make(getattr(record, key)))
            if record is votes and key in ("sigma", "draws"):
                told[key] = getattr(votes, key)
        refigured(folder, votes, attack, **told)

    return change


def in_rows(folder: Path) -> None:
    path = folder / "smoothing.json"
    stated = json.loads(path.read_text())
    for row in stated["rows"]:
        row["vote certified"] = 0.999
    path.write_text(json.dumps(stated))


def linked(folder: Path) -> None:
    (folder / "votes.safetensors").rename(folder.parent / "outside")
    (folder / "votes.safetensors").symlink_to(folder.parent / "outside")


SMOOTHED: dict[str, Case] = {
    "figures of its own": (in_rows, "false"),
    "votes that all hit": (voted(hits=lambda hits: hits * 0 + 200), "false"),
    "a few more votes": (voted(hits=lambda hits: (hits + 9).clamp(max=200)), "false"),
    "more noise than there was": (voted(sigma=lambda sigma: 2 * sigma), "false"),
    "ten times the draws": (
        voted(
            draws=lambda draws: 10 * draws,
            hits=lambda hits: 10 * hits,
            first=lambda first: 10 * first,
        ),
        "false",
    ),
    "another seed": (voted(seed=lambda seed: seed + 1), "false"),
    "other samples": (voted(info=lambda info: {**info, "samples": "ab"}), "false"),
    "another model": (voted(info=lambda info: {**info, "weights": "ab"}), "false"),
    "points that are nearer than they are": (voted(attack_distances=lambda d: d / 2), "false"),
    "points where the model is always wrong": (voted(attack_high=lambda h: h * 0), "false"),
    "points elsewhere": (voted(attack_points=lambda x: x * 0), "false"),
    "a link": (linked, "refused"),
}
