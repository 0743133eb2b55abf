"""The protocol against direct calls of what it is made of, and on the corner cases that people
meet.
"""

import inspect
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import wassail as ws
from wassail.errors import InputError
from wassail.evaluation.chunks import holds, judged
from wassail.evaluation.plan import plan
from wassail.evaluation.settings import Choices
from wassail.evaluation.store.store import Store
from wassail.evaluation.tasks import pool
from wassail.geometry import distances as distances_between
from wassail.testing import LinearClassifier, samples
from wassail.threat import ceil_percent
from wassail.transport import curve

THREATS = [ws.Threat("inf", p, "0.05") for p in (1, 2, "inf")]


@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    x, y = ws.zoo.data()
    return ws.zoo.load("digits-mlp-adv"), x[:30], y[:30]


@pytest.fixture(scope="module")
def run(digits, tmp_path_factory) -> ws.Evaluation:
    model, x, y = digits
    out = tmp_path_factory.mktemp("run") / "one"
    return ws.evaluate(
        model,
        (x, y),
        THREATS,
        ("wda", "wda++", "nearest", "w-pgd", "apgd-ce"),
        out=out,
        chunk=11,
        certify="crown",
    )


def test_rows_are_what_the_attacks_say_alone(run, digits) -> None:
    model, x, y = digits
    direct = {
        "wda": ws.wda(model, x, y, THREATS[0]),
        "wda++": ws.wda_pp(model, x, y, THREATS[0]),
        "w-pgd": ws.w_pgd(model, x, y, THREATS[1]),
        "apgd-ce": ws.apgd(model, x, y, THREATS[2], loss="ce"),
    }
    for row in run.rows:
        if row.attack in direct and row.threat == direct[row.attack].threat:
            found = direct.pop(row.attack)
            assert row.accuracy == pytest.approx(found.accuracy, abs=1e-6)
            assert (
                row.cost == pytest.approx(found.spent * row.threat.eps, abs=1e-9)
                and row.cost <= found.cost + 1e-9
            )
    assert not direct
    over = {(row.attack, row.threat.order) for row in run.rows}
    assert ("nearest", 2.0) in over and ("apgd-ce", 1.0) not in over and ("w-pgd", 1.0) not in over


def test_the_pool_is_the_nearest_of_all_and_its_images_are_the_flips(run, digits) -> None:
    model, x, y = digits
    flips = run.flips()
    assert torch.equal(flips.x, x) and torch.equal(run.y, y)
    again = ws.Flips.from_points(model, x, y, flips.points, "inf", pull_in=False, tolerance=0.0)
    assert torch.equal(again.distances, run.distances)
    nearest = ws.nearest(model, x, y, "inf", passes=100)
    assert (run.distances <= nearest.distances * (1 + 1e-6)).all() and (
        run.distances < nearest.distances * (1 - 1e-6)
    ).sum() < 30
    for row in run.best:
        found = ws.allocate(flips, row.threat.eps, row.threat.order)
        assert (
            row.accuracy == pytest.approx(found.accuracy, abs=1e-12) and row.cost <= row.threat.eps
        )
        assert row.interval[0] <= row.accuracy <= row.interval[1] and found.verify(model)


def test_both_sides_and_one_headline(run, digits) -> None:
    model, x, y = digits
    radii = ws.radii(model, x, y, "inf", method="crown", upper=run.distances)
    assert run.radii is not None and (run.radii <= run.distances).all()
    assert torch.allclose(run.radii, radii.values, rtol=0.02)
    certified, attacked = run.curve(1)("0.05")
    assert 0 < certified <= attacked == pytest.approx(run.best[0].accuracy)
    assert (
        run.headline.startswith("Between ")
        and f"{ceil_percent(attacked)} %" in run.headline
        and "proved" in run.definition
    )
    summary = json.loads((run_folder(run) / "results" / "summary.json").read_text())
    assert summary["headline"] == run.headline and len(summary["attacks"]) == len(run.rows)
    column = summary["curves"][0]
    k = column["eps"].index(0.05)
    assert (column["certified"][k], column["attacked"][k]) == (certified, attacked)


def run_folder(run):
    return run.images.__self__.store.folder


def test_the_size_of_a_chunk_changes_nothing_but_rounding(run, digits) -> None:
    model, x, y = digits
    other = ws.evaluate(
        model,
        (x, y),
        THREATS,
        ("wda", "wda++", "nearest", "w-pgd", "apgd-ce"),
        chunk=30,
        look=False,
    )
    assert torch.allclose(other.distances, run.distances, rtol=1e-3)
    for a, b in zip(run.rows, other.rows):
        assert (a.attack, a.threat) == (b.attack, b.threat) and a.accuracy == pytest.approx(
            b.accuracy, abs=1e-3
        )


def test_the_transfer_does_not_depend_on_the_chunks(digits) -> None:
    """Without gradients it is all there is: every sample looks for another class among the same
    ones.
    """
    plain, x, y = digits

    def broken(x: torch.Tensor) -> torch.Tensor:
        """Its gradient is NaN."""
        return plain(x) + 0 * (x - x).abs().sum((1, 2, 3)).sqrt()[:, None]

    runs = [
        ws.evaluate(broken, (x, y), THREATS[:1], ("nearest",), chunk=chunk) for chunk in (1, 7, 30)
    ]
    for run in runs:
        assert torch.allclose(run.distances, runs[0].distances, rtol=1e-4)
        assert [(f.name, f.level) for f in run.findings] == [
            (f.name, f.level) for f in runs[0].findings
        ]
    assert any(f.name == "transfer" for f in runs[0].warnings) and 0 < runs[0].best[0].accuracy < 1


def test_a_curve_is_sorted_once(run, monkeypatch) -> None:
    orders = (1, "1", 2.0, "inf")
    expected = [run.curve(order)("0.03") for order in orders]
    again = ws.Evaluation.load(run.folder)
    made = []
    real = curve.Side

    def side(*arguments):
        made.append(arguments[2])  # its order
        return real(*arguments)

    monkeypatch.setattr(curve, "Side", side)
    for _ in range(3):
        assert [again.curve(order)("0.03") for order in orders] == expected
    assert sorted(made) == [1, 1, 2, 2, math.inf, math.inf]  # both sides of each


def test_it_is_read_back_as_it_was(run) -> None:
    again = ws.Evaluation.load(run_folder(run))
    assert (
        torch.equal(again.distances, run.distances)
        and again.rows == run.rows
        and again.findings == run.findings
    )
    assert again.headline == run.headline and again.info == run.info
    some = [17, 3, 17]
    for one, all_ in zip(again.images(some), run.images(range(len(run)))):
        assert torch.equal(one, all_[some])


def test_a_run_is_verified_against_a_model(run, digits) -> None:
    model = digits[0]
    assert run.verify(model) and run.verify(model, batch_size=7).problems == ()
    bare = replace(run, folder=None)  # what is in memory, alone
    assert any(
        "not predicted as stated" in text
        for text in bare.verify(ws.zoo.load("digits-vit")).problems
    )
    nearer = replace(bare, distances=run.distances * 0.99)
    assert nearer.verify(model).problems == (
        f"{int((run.distances > 0).sum())} distances are not as stated",
    )
    still = replace(bare, images=lambda chosen: (run.images(chosen)[0],) * 2)
    assert any("flips are not misclassified" in text for text in still.verify(model).problems)
    changed = replace(run, distances=run.distances * 0.99).verify(model).problems
    assert "what is in memory is not what the run's folder holds: load it again." in changed


def test_linear_classifiers_are_evaluated_exactly() -> None:
    model = LinearClassifier.random(3, 5, seed=1)
    x, y = samples(40, (5,), 3, seed=2)
    y = model(x).argmax(1)
    y[:4] = (y[:4] + 1) % 3  # wrong to begin with
    threats = [
        ws.Threat(2, 1, 0.05, None),
        ws.Threat(2, 1, 0.2, None),
        ws.Threat(2, "inf", 0.2, None),
    ]
    run = ws.evaluate(model, (x, y), threats, {"nearest": {}, "wda": {"kappa": 4}}, chunk=7)
    assert torch.allclose(run.distances, model.distances(x, y, 2, None), rtol=1e-3)
    assert run.clean == pytest.approx(0.9) and [row.threat.eps for row in run.best] == [
        0.05,
        0.2,
        0.2,
    ]
    assert {row.title for row in run.rows} == {"nearest", "WDA, kappa 4"}
    assert (run.distances[:4] == 0).all() and torch.equal(run.labels[:4], run.predicted[:4])


@pytest.mark.parametrize("n", [0, 1])
def test_no_sample_and_one_sample(n, digits) -> None:
    model, x, y = digits
    run = ws.evaluate(
        model, (x[:n], y[:n]), THREATS, ("wda++", "nearest", "w-pgd"), certify="crown"
    )
    assert len(run) == n and repr(run)
    if n == 0:
        assert math.isnan(run.clean) and "No samples" in run.headline
    else:
        assert run.clean in (0.0, 1.0)


def test_all_wrong_is_zero_everywhere(digits) -> None:
    model, x, _y = digits
    run = ws.evaluate(
        model,
        (x[:6], (model(x[:6]).argmax(1) + 1) % 10),
        THREATS[:1],
        ("wda", "nearest"),
        certify="crown",
    )
    assert (
        run.clean == 0
        and all(row.accuracy == 0 for row in (*run.rows, *run.best))
        and (run.distances == 0).all()
    )


def test_weights_of_the_samples_count(digits) -> None:
    model, x, y = digits
    mu = torch.arange(1.0, 31)
    run = ws.evaluate(model, (x, y), THREATS[:1], ("wda++",), mu=mu, look=False)
    flips = ws.wda_pp(model, x, y, THREATS[0]).flips
    assert run.best[0].accuracy == pytest.approx(ws.allocate(flips, 0.05, 1, mu).accuracy, abs=1e-6)
    plain = ws.evaluate(model, (x, y), THREATS[:1], ("wda++",), look=False)
    assert abs(run.best[0].accuracy - plain.best[0].accuracy) > 1e-3


def test_flips_that_do_not_last_are_not_counted(digits, monkeypatch) -> None:
    """A model that answers differently at the final look: its flips go, and a warning says so."""
    model, x, y = digits
    correct = model(x).argmax(1) == y
    x = x[correct]
    y = y[correct]
    monkeypatch.setattr(pool, "holds", lambda found, points, stated: stated.isinf())
    run = ws.evaluate(model, (x, y), THREATS[:1], ("nearest", "wda++"), look=False)
    assert torch.isinf(run.distances).all() and any(f.name == "unstable" for f in run.warnings)
    assert all(row.accuracy == 1 for row in run.rows)  # nor in the rows of the attacks


def test_choices_are_arguments_of_evaluate_with_its_defaults() -> None:
    """The command line fills this record and hands it over as it is."""
    parameters = inspect.signature(ws.evaluate).parameters
    for name, value in vars(Choices()).items():
        assert parameters[name].default == value, name


def test_the_final_look_finds_what_is_wrong(digits) -> None:
    model, x, y = digits
    flips = ws.nearest(model, x, y, "inf", passes=20)
    use = flips.success & (flips.distances > 0)
    x = x[use]
    y = y[use]
    points = flips.points[use]
    stated = flips.distances[use]

    def looked(points: torch.Tensor, stated: torch.Tensor) -> torch.Tensor:
        return holds(judged(model, x, y, points, math.inf, (0.0, 1.0)), points, stated)

    assert looked(points, stated).all()
    assert not looked(x, torch.full_like(stated, 1e-9)).any()  # not wrong
    assert not looked(points, stated * 0.999).any()  # not as near as it says
    outside = points.clone()
    outside[0, 0, 0, 0] = -1e-3
    away = distances_between(outside, x, math.inf)
    assert not looked(outside, away)[0]
    assert not looked(outside, stated)[0]  # nor where the place outside is no farther


@pytest.mark.parametrize("name", ["distances", "labels", "found_by"])
def test_numbers_that_cannot_be_are_refused(name, digits, tmp_path) -> None:
    """A run that somebody wrote by hand, checksums and all."""
    model, x, y = digits
    ws.evaluate(model, (x[:4], y[:4]), THREATS[:1], ("wda++",), out=tmp_path / "run", look=False)
    (key,) = (path.name for path in (tmp_path / "run" / "results").glob("pool@*"))
    changed(
        tmp_path / "run",
        key,
        **{name: lambda value: value * 0 + (-1 if name != "found_by" else 99)},
    )
    with pytest.raises(InputError, match="changed"):
        ws.Evaluation.load(tmp_path / "run")


def changed(folder, key, **tensors) -> None:
    """A chunk with other tensors, checksums and all."""
    with Store.resume(folder, Store.open(folder).config) as store:
        kept, fields = store.get(key, 0)
        (folder / "results" / key / "000000.safetensors").unlink()
        store.put(
            key,
            0,
            {**kept, **{name: change(kept[name]) for name, change in tensors.items()}},
            fields,
        )


LIES = {
    "nearer": ("attack@wda++", {"distances": lambda d: d / 10}, "not those of the attacks"),
    "no point": ("attack@wda++", {"index": lambda i: i + 1000}, "flips without points"),
    "shape": ("attack@wda++", {"points": lambda p: p.flatten(1)}, "no samples"),
    "NaN": ("clean", {"x": lambda x: x.float() * math.nan}, "no samples"),
    "yes and no": ("clean", {"x": lambda x: x > 0}, "no samples"),
}


@pytest.mark.parametrize("case", LIES)
def test_files_that_contradict_each_other_are_refused(case, digits, tmp_path) -> None:
    model, x, y = digits
    key, tensors, words = LIES[case]
    ws.evaluate(model, (x[:4], y[:4]), THREATS[:1], ("wda++",), out=tmp_path, look=False)
    changed(tmp_path, key, **tensors)
    with pytest.raises(InputError, match=words):
        ws.Evaluation.load(tmp_path).images(range(4))


def test_more_effort_proves_more_and_is_recorded(digits) -> None:
    model, x, y = digits
    settings: dict[str, Any] = {"certify": "auto", "look": False}
    some = (x[:3], y[:3])
    none = ws.evaluate(model, some, THREATS[:1], ("wda++",), effort=0, **settings)
    full = ws.evaluate(model, some, THREATS[:1], ("wda++",), effort=0.2, **settings)
    assert (full.radii >= none.radii).all() and (full.radii > none.radii).any()
    assert full.info["certify"]["effort"] == 0.2
    with pytest.raises(InputError, match="together with certify"):
        ws.evaluate(model, some, THREATS[:1], ("wda++",), effort=1)


def test_a_finished_run_that_is_damaged_says_so_and_is_mended(digits, tmp_path) -> None:
    model, x, y = digits
    settings: dict[str, Any] = {
        "out": tmp_path,
        "certify": "crown",
        "chunk": 2,
        "look": False,
    }
    first = ws.evaluate(model, (x[:4], y[:4]), THREATS[:1], ("wda++",), **settings)
    path = tmp_path / "results" / "radii@crown" / "000001.safetensors"
    good = path.read_bytes()
    for _ in range(2):  # the second time its damage is in the log
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        hurt = ws.Evaluation.load(tmp_path)
        assert hurt.radii is None and any(
            f.name == "unfinished" and "certificates" in f.text for f in hurt.warnings
        )
        again = ws.evaluate(model, (x[:4], y[:4]), THREATS[:1], ("wda++",), resume=True, **settings)
        assert path.read_bytes() == good
        assert again.radii is not None and first.radii is not None
        assert torch.equal(again.radii, first.radii)


def test_a_dataset_with_other_labels_is_refused(digits, tmp_path) -> None:
    model, x, y = digits

    class Items(torch.utils.data.Dataset[Any]):
        def __init__(self, y):
            self.y = y

        def __len__(self):
            return 90

        def __getitem__(self, k):
            return x[k % 30], int(self.y[k])

    labels = torch.cat([y] * 3)
    ws.evaluate(model, Items(labels), THREATS[:1], ("fgsm", "wda++"), out=tmp_path, look=False)
    labels[1] = (labels[1] + 1) % 10  # of 90 samples about every third is hashed beforehand
    with pytest.raises(InputError, match="not those that the run was begun with"):
        ws.evaluate(
            model,
            Items(labels),
            THREATS[:1],
            ("fgsm", "wda++"),
            out=tmp_path,
            look=False,
            resume=True,
        )


def test_an_attack_that_answers_no_threat_is_told(digits) -> None:
    model, x, y = digits
    run = ws.evaluate(model, (x[:3], y[:3]), THREATS[0], ("fgsm", "wda++", "pgd"), look=False)
    assert {row.attack for row in run.rows} == {"wda++"}
    assert next(f.text for f in run.findings if f.name == "idle").startswith(
        "No threat has an order that fgsm and pgd answers"
    )


def test_orders_that_look_alike_are_two() -> None:
    threats = [ws.Threat("inf", order, 0.1) for order in (1.4142135, 1.4142136)]
    assert len({unit.key for unit in plan(threats, {"wda": {}})}) == 2


BAD = {
    "two norms": ({"threats": [ws.Threat("inf", 1, 0.1), ws.Threat(2, 1, 0.1)]}, "differ in norm"),
    "no attack": ({"attacks": ()}, "no attack to evaluate with"),
    "no threat": ({"threats": []}, "no threat"),
    "attack": ({"attacks": ("wda+",)}, "did you mean 'wda\\+\\+'"),
    "order": ({"attacks": ("apgd-ce",), "threats": THREATS[0]}, "none of apgd-ce answers order 1"),
    "option": ({"attacks": {"wda": {"kapa": 2}}}, "has no option 'kapa'"),
    "l1": ({"attacks": ("w-pgd",), "threats": ws.Threat(1, 2, 1.0)}, "no l1 form"),
    "batch": ({"batch_size": -3}, "batch_size is -3"),
    "chunk": ({"chunk": 0}, "chunk is 0"),
    "method": ({"certify": "magic"}, "unknown method"),
    "precision": ({"gradients": "int8"}, "unknown precision"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_told_before_any_work(case, digits, tmp_path) -> None:
    model, x, y = digits
    settings, words = BAD[case]
    out = tmp_path / "run"
    threats = settings.get("threats", THREATS)
    rest = {k: v for k, v in settings.items() if k != "threats"}
    with pytest.raises(InputError, match=words):
        ws.evaluate(model, (x, y), threats, out=out, **rest)
    assert not out.exists()


def test_bad_samples_are_named_by_their_place(digits) -> None:
    model, x, y = digits
    x = x.clone()
    x[25] = math.nan
    with pytest.raises(InputError, match="samples 20 to 29"):
        ws.evaluate(model, (x, y), THREATS[:1], ("wda++",), chunk=10)


def test_progress_only_grows_and_ends_at_one(digits) -> None:
    model, x, y = digits
    seen: list[float] = []
    ws.evaluate(
        model,
        (x[:10], y[:10]),
        THREATS,
        ("wda", "wda++", "w-pgd"),
        chunk=4,
        certify="crown",
        progress=seen.append,
    )
    assert seen == sorted(seen) and seen[-1] == pytest.approx(1.0) and max(seen) <= 1 + 1e-9


def test_mixed_precision_decides_in_float32(digits) -> None:
    model, x, y = digits
    run = ws.evaluate(model, (x, y), THREATS, ("nearest",), gradients="bfloat16", look=False)
    flips = run.flips()
    again = ws.Flips.from_points(model, x, y, flips.points, "inf", pull_in=False)
    assert torch.equal(again.distances, run.distances) and torch.isfinite(run.distances).all()


def test_the_model_is_left_as_it_was(digits) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)).train()
    torch.manual_seed(0)
    x = digits[1][:5]
    y = digits[2][:5]
    ws.evaluate(model, (x, y), THREATS[:1], ("wda++",))
    assert model.training and all(p.requires_grad for p in model.parameters())
