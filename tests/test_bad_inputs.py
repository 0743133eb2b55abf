"""Bad input, as people give it: one sentence with cause and fix, never a traceback of something
else, a raw warning or a quiet number. The command line has a table of its own in tests/cli.
"""

# mypy: disable-error-code="arg-type"
# Wrong arguments are what the table is made of.

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from wassail.names import ATTACKS
from wassail.transport.allocation import transport_cost

INF = math.inf
NAN = math.nan
X, Y = (t[:6] for t in ws.zoo.data("digits"))
MODEL = ws.zoo.load("digits-mlp")
POINT = ws.Threat("inf", "inf", 0.1)
ONE = ws.Threat("inf", 1, 0.1)
FLIPS = ws.nearest(MODEL, X, Y, INF, passes=12)
RADII = ws.Radii(
    torch.zeros(6, dtype=torch.float64), torch.zeros(6, dtype=torch.bool), "crown", INF, (0.0, 1.0)
)

Case = tuple[Callable[[], Any], str]


def failing(error: BaseException) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        raise error

    return forward


def nearest(model: Any = MODEL, x: Any = X, y: Any = Y, norm: Any = INF, **more: Any) -> Any:
    return ws.nearest(model, x, y, norm, **{"passes": 12, **more})


def radii(model: Any = MODEL, x: Any = X, y: Any = Y, norm: Any = INF, **more: Any) -> Any:
    return ws.radii(model, x, y, norm, **{"method": "crown", **more})


def evaluate(model: Any = MODEL, data: Any = (X, Y), threat: Any = POINT, **more: Any) -> Any:
    return ws.evaluate(model, data, threat, more.pop("attacks", ["fgsm"]), **more)


ONE_OUTPUT = nn.Linear(64, 1)
ZEROS = torch.zeros(6)


def regression(y: Any = ZEROS + 0.5, threat: Any = POINT, **more: Any) -> Any:
    data = more.pop("data", (X.flatten(1), y))
    return ws.evaluate(ONE_OUTPUT, data, threat, ["fgsm"], **more)


DATA: dict[str, tuple[dict[str, Any], str]] = {
    "y None": ({"y": None}, "the labels are None"),
    "x None": ({"x": None}, "the samples are None"),
    "y float": ({"y": Y.float()}, "the labels are float32"),
    "y one-hot": ({"y": nn.functional.one_hot(Y, 10)}, "shape (6, 10)"),
    "y negative": ({"y": Y - 10}, "the labels range over -9..-3"),
    "y large": ({"y": Y + 10}, "the model has 10 classes"),
    "y short": ({"y": Y[:2]}, "6 samples but 2 labels"),
    "y text": ({"y": ["a"] * 6}, "the labels are a list that is no array"),
    "y bool": ({"y": Y > 3}, "the labels are bool"),
    "x text": ({"x": "digits"}, "the samples are a str that is no array"),
    "x ragged": ({"x": [[1.0], [1.0, 2.0]]}, "the samples are a list that is no array"),
    "x NaN": ({"x": X * NAN}, "sample 0 contains NaN"),
    "x inf": ({"x": X / 0}, "sample 0 contains NaN or infinity"),
    "x uint8": ({"x": (X * 255).byte()}, "divide by 255 if they are 8-bit"),
    "x 0..255": ({"x": X * 255}, "these look like 8-bit images"),
    "x 0..16": ({"x": X * 16}, "give their domain"),
    "x normalised": ({"x": X * 2 - 1}, "put any normalisation inside the model"),
    "x half": ({"x": X.half()}, "the samples are float16"),
    "x complex": ({"x": X.to(torch.complex64)}, "the samples are complex64"),
    "x cropped": ({"x": X[:, :, :4]}, "does not accept samples of shape (6, 1, 4, 8)"),
    "grey as RGB": ({"x": X.expand(-1, 3, 8, 8)}, "does not accept samples of shape (6, 3, 8, 8)"),
    "one sample": ({"x": X[0, 0, 0], "y": Y[:1]}, "use x[None] for one"),
    "x sparse": ({"x": X.to_sparse()}, "convert them with to_dense()"),
    "norm 7": ({"norm": 7}, "norm 7 is not supported"),
    "norm None": ({"norm": None}, "norm None is not supported"),
    "domain foo": ({"domain": "foo"}, "domain 'foo' is not a box"),
    "domain 01": ({"domain": "01"}, "domain '01' is not a box"),
    "domain of three": ({"domain": (0, 1, 2)}, "domain (0, 1, 2) is not a box"),
    "domain number": ({"domain": 1}, "domain 1 is not a box"),
    "domain upside down": ({"domain": (1, 0)}, "domain (1, 0) is empty"),
    "domain NaN": ({"domain": (0, NAN)}, "domain is NaN"),
    "method": ({"method": "best"}, "unknown method 'best'"),
    "method None": ({"method": None}, "unknown method None"),
    "method list": ({"method": ["crown"]}, "unknown method ['crown']"),
    "batch 0": ({"batch_size": 0}, "batch_size is 0"),
    "batch text": ({"batch_size": "a"}, "batch_size is 'a'"),
    "batch 2.5": ({"batch_size": 2.5}, "batch_size is 2.5"),
    "eps 0": ({"eps": 0, "order": 1}, "eps is 0, but a budget"),
    "eps text": ({"eps": "tiny", "order": 1}, "eps 'tiny' is not a number"),
    "order w1": ({"eps": 0.1, "order": "w1"}, "order 'w1' is not a number"),
    "progress": ({"progress": "yes"}, "progress is 'yes'"),
    "model None": ({"model": None}, "the model is a NoneType"),
    "model name": ({"model": "digits-mlp"}, "the model is a str"),
    "state dict": ({"model": dict(MODEL.state_dict())}, "the model is a dict"),
}

MODELS: dict[str, tuple[Any, str]] = {
    "RuntimeError": (failing(RuntimeError("mat1")), "does not accept samples"),
    "ValueError": (failing(ValueError("bad")), "with ValueError: bad; repair"),
    "KeyError": (failing(KeyError("k")), "with KeyError: 'k'; repair"),
    "ZeroDivisionError": (failing(ZeroDivisionError("division by zero")), "division by zero"),
    "NotImplementedError": (failing(NotImplementedError()), "does not accept samples"),
    "IndexError": (failing(IndexError()), "with IndexError; repair"),
    "AssertionError": (failing(AssertionError()), "with AssertionError; repair"),
    "TypeError": (failing(TypeError("missing 'mask'")), "missing 'mask'"),
    "AttributeError": (failing(AttributeError("x")), "with AttributeError: x; repair"),
    "OSError": (failing(OSError("disk")), "with OSError: disk; repair"),
    "StopIteration": (failing(StopIteration()), "with StopIteration; repair"),
    "dict": (lambda x: {"logits": MODEL(x)}, "returns a dict, not a tensor"),
    "tuple": (lambda x: (MODEL(x), 1), "returns a tuple, not a tensor"),
    "None": (lambda x: None, "returns a NoneType"),
    "float": (lambda x: 1.0, "returns a float"),
    "array": (lambda x: MODEL(x).detach().numpy(), "returns a ndarray"),
    "three axes": (lambda x: MODEL(x)[:, :, None], "to (6, 10, 1)"),
    "one logit": (lambda x: MODEL(x)[:, :1], "the model has one output"),
    "one axis": (lambda x: MODEL(x)[:, 0], "to (6,)"),
    "classes": (lambda x: MODEL(x).argmax(1), "to (6,)"),
    "fewer rows": (lambda x: MODEL(x)[:1], "to (1, 10)"),
    "softmax": (lambda x: MODEL(x).softmax(1), "the model returns probabilities"),
    "complex": (lambda x: MODEL(x).to(torch.complex64), "complex numbers"),
}

NEAREST: dict[str, tuple[Any, str]] = {
    "whole logits": (lambda x: MODEL(x).long(), "do not depend differentiably"),
    "detached": (lambda x: MODEL(x).detach(), "do not depend differentiably"),
    "NaN": (lambda x: MODEL(x) * NAN, "NaN or infinity at sample 0"),
}

CASES: dict[str, Case] = {
    "threats text": (lambda: evaluate(threat="8/255"), "the threat is '8/255'"),
    "threats number": (lambda: evaluate(threat=0.1), "the threat is 0.1"),
    "threats numbers": (lambda: evaluate(threat=[0.1]), "the threat is 0.1"),
    "threats None": (lambda: evaluate(threat=None), "the threat is None"),
    "no threat": (lambda: evaluate(threat=[]), "there is no threat"),
    "two norms": (lambda: evaluate(threat=[ONE, ws.Threat(2, 1, 0.1)]), "differ in norm"),
    "eps beyond the box": (
        lambda: evaluate(threat=ws.Threat("inf", 1, 8)),
        "no two points of the box [0, 1] are further apart than 1 in linf",
    ),
    "eps beyond the box, l2": (
        lambda: evaluate(threat=ws.Threat(2, 1, 8.01)),
        "further apart than 8 in l2",
    ),
    "attacks None": (lambda: evaluate(attacks=None), "attacks is None"),
    "no attacks": (lambda: evaluate(attacks=[]), "there is no attack"),
    "options text": (lambda: evaluate(attacks={"pgd": "fast"}), "the options of attack 'pgd'"),
    "option": (lambda: evaluate(attacks={"nearest": {"speed": 3}}), "no option 'speed'"),
    "attack number": (lambda: evaluate(attacks=[3]), "unknown attack 3"),
    "letters": (lambda: evaluate(attacks="nearset"), "unknown attack 'nearset'"),
    "passes 2.5": (lambda: evaluate(attacks=["nearest"], passes=2.5), "passes is 2.5"),
    "passes 0": (lambda: evaluate(attacks=["nearest"], passes=0), "passes is 0"),
    "passes text": (lambda: evaluate(attacks=["nearest"], passes="x"), "passes is 'x'"),
    "passes True": (lambda: evaluate(attacks=["nearest"], passes=True), "passes is True"),
    "seed text": (lambda: evaluate(seed="a"), "seed is 'a'"),
    "seed 1.5": (lambda: evaluate(seed=1.5), "seed is 1.5"),
    "chunk 2.5": (lambda: evaluate(chunk=2.5), "chunk is 2.5"),
    "chunk 0": (lambda: evaluate(chunk=0), "chunk is 0"),
    "batch": (lambda: evaluate(batch_size="a"), "batch_size is 'a'"),
    "certify True": (lambda: evaluate(certify=True), "unknown method True"),
    "time text": (lambda: evaluate(certify="crown", time_limit="soon"), "'soon' is not a number"),
    "time negative": (lambda: evaluate(certify="crown", time_limit=-1), "time_limit is -1"),
    "out number": (lambda: evaluate(out=3), "out is 3"),
    "resume nothing": (lambda: evaluate(resume=True), "resume and add need out"),
    "mu short": (lambda: evaluate(mu=torch.ones(3)), "mu must hold 6"),
    "mu negative": (lambda: evaluate(mu=-torch.ones(6)), "mu must hold 6"),
    "mu NaN": (lambda: evaluate(mu=torch.full((6,), NAN)), "mu must hold 6"),
    "mu zero": (lambda: evaluate(mu=torch.zeros(6)), "mu must hold 6"),
    "mu text": (lambda: evaluate(mu="uniform"), "sample weights mu are a str"),
    "data None": (lambda: evaluate(data=None), "NoneType is no data"),
    "data number": (lambda: evaluate(data=3), "int is no data"),
    "data without labels": (lambda: evaluate(data=X), "must be a pair (sample, label)"),
    "labels None": (lambda: evaluate(data=(X, None)), "give class indices of shape (N,)"),
    "samples None": (lambda: evaluate(data=(None, Y)), "a batch has shape (N, ...)"),
    "no file": (lambda: evaluate(data="nowhere.npz"), "No such file"),
    "tolerance 0": (lambda: regression(tolerance=0), "the tolerance is 0: give a number above 0"),
    "tolerance -1": (lambda: regression(tolerance=-1), "the tolerance is -1"),
    "tolerance inf": (lambda: regression(tolerance=INF), "the tolerance is inf"),
    "tolerance NaN": (lambda: regression(tolerance=NAN), "tolerance is NaN"),
    "tolerance word": (lambda: regression(tolerance="much"), "tolerance 'much' is not a number"),
    "tolerance 0%": (lambda: regression(tolerance="0%"), "the tolerance is 0%"),
    "tolerance short": (lambda: regression(tolerance=torch.ones(3)), "tolerances have shape (3,)"),
    "tolerance zeros": (lambda: regression(tolerance=torch.zeros(6)), "a tolerance is 0"),
    "tolerance dict": (lambda: regression(tolerance={}), "the tolerance is a dict"),
    "relative to 0": (lambda: regression(y=ZEROS, tolerance="5%"), "sample 0 has the target 0"),
    "no tolerance": (lambda: regression(), "say how far off it may be, with tolerance"),
    "targets matrix": (lambda: regression(y=torch.rand(6, 3)), "with tolerance"),
    "targets of two": (
        lambda: regression(y=torch.rand(6, 2), tolerance=1),
        "each sample has 2 targets and the model 1 outputs",
    ),
    "targets cube": (
        lambda: regression(y=torch.rand(6, 2, 2), tolerance=1),
        "have shape (6, 2, 2)",
    ),
    "targets short": (lambda: regression(y=torch.rand(5), tolerance=1), "6 samples but 5 labels"),
    "targets NaN": (lambda: regression(y=ZEROS * NAN, tolerance=1), "a target of"),
    "targets text": (lambda: regression(y=["a"] * 6, tolerance=1), "give numbers"),
    "targets for a classifier": (
        lambda: evaluate(data=(X, Y.float()), tolerance=1),
        "each sample has 1 targets and the model 10 outputs",
    ),
    "float labels": (lambda: evaluate(data=(X, Y.float())), "save class indices as integers"),
    "one output": (lambda: regression(y=Y), "tolerance=0.5 for a regression"),
    "labels of two": (lambda: regression(y=Y, threshold=0), "labels other than 0 and 1"),
    "threshold text": (lambda: regression(y=Y > 3, threshold="a"), "threshold 'a' is not a number"),
    "both": (lambda: regression(tolerance=1, threshold=0), "give one"),
    "label alone": (lambda: regression(y=Y, label=0), "give threshold, too"),
    "label 3": (lambda: regression(y=Y > 3, threshold=0, label=3), "label 3 is none of 1 labels"),
    "label of targets": (lambda: regression(tolerance=1, label=0), "leave it out of a regression"),
    "items": (lambda: regression(data=[(X[0], 1.5)], tolerance=1), "give a pair (x, y)"),
    "task landmarks": (
        lambda: regression(tolerance=1, landmarks="standard"),
        "landmarks are for classes",
    ),
    "immutable name": (lambda: regression(tolerance=1, immutable=["age"]), "feature 'age' may not"),
    "immutable place": (lambda: regression(tolerance=1, immutable=[64]), "feature 64 may not move"),
    "immutable word": (lambda: regression(tolerance=1, immutable="age"), "give a list of names"),
    "immutable all": (
        lambda: regression(tolerance=1, immutable=range(64)),
        "no feature may move",
    ),
    "immutable pixels": (lambda: evaluate(immutable=[0]), "samples of shape (F,)"),
    "immutable no box": (
        lambda: regression(tolerance=1, immutable=[0], threat=ws.Threat(2, 1, 0.1, None)),
        "need a box for the others",
    ),
    "precision": (lambda: evaluate(gradients="fast"), "unknown precision 'fast'"),
    "arithmetic": (lambda: evaluate(arithmetic="half"), "unknown arithmetic 'half'"),
    "name number": (lambda: evaluate(name=3), "name is 3"),
    "name empty": (lambda: evaluate(name=" "), "name is ' '"),
    "nearest passes": (lambda: nearest(passes=2.5), "passes is 2.5"),
    "nearest passes 0": (lambda: nearest(passes=0), "passes is 0"),
    "nearest seed": (lambda: nearest(seed="a"), "seed is 'a'"),
    "nearest option": (lambda: nearest(foo=3), "has no option 'foo'"),
    "wda++ step": (lambda: nearest(method="wda++", passes=None), "WDA++ needs a step size"),
    "tolerance": (lambda: radii(tolerance=0), "tolerance is 0"),
    "tolerance text": (lambda: radii(tolerance="a"), "tolerance 'a' is not a number"),
    "radii time": (lambda: radii(time_limit=-1), "time_limit is -1"),
    "radii effort": (lambda: radii(effort=-1), "effort is -1"),
    "radii gone": (lambda: radii(method="alpha-crown"), "is gone"),
    "radii start": (lambda: radii(start="a"), "start is a str"),
    "radii eps alone": (lambda: radii(eps=0.1), "eps and order steer together"),
    "verify threat": (lambda: ws.verify(MODEL, X, Y, 0.1), "the threat is 0.1"),
    "verify method": (lambda: ws.verify(MODEL, X, Y, POINT, method="x"), "unknown method 'x'"),
    "worst case": (lambda: ws.worst_case(MODEL, X, Y, 0.1), "the threat is 0.1"),
    "curve order": (lambda: ws.loss_curve(MODEL, X, Y, 2, "w1"), "order 'w1'"),
    "curve loss": (lambda: ws.loss_curve(MODEL, X, Y, 2, 1, "mse"), "unknown loss 'mse'"),
    "certify loss": (lambda: ws.certify(MODEL, X, Y, 2, "mse"), "unknown loss 'mse'"),
    "certify dlr": (lambda: ws.certify(MODEL, X, Y, 2, "dlr"), "not Lipschitz"),
    "certify slope": (lambda: ws.certify(MODEL, X, Y, slopes=["x"]), "unknown slope 'x'"),
    "certify labels": (lambda: ws.certify(MODEL, X, None), "the labels are None"),
    "certify nothing": (lambda: ws.certify(MODEL, X[:0], Y[:0]), "there are no samples"),
    "lipschitz norm": (lambda: ws.lipschitz(MODEL, 5, shape=(1, 8, 8)), "norm 5"),
    "lipschitz method": (lambda: ws.lipschitz(MODEL, 2, method="x"), "unknown method 'x'"),
    "lipschitz outputs": (lambda: ws.lipschitz(MODEL, 2, outputs="x"), "unknown outputs 'x'"),
    "lipschitz shape": (lambda: ws.lipschitz(lambda x: x, 2), "the shape of a sample"),
    "ball norm": (lambda: ws.Ball(X[0], 0.1, 7), "norm 7 is not supported"),
    "ball radius": (lambda: ws.Ball(X[0], -0.1), "the ball's radius is -0.1"),
    "ball radius text": (lambda: ws.Ball(X[0], "a"), "radius 'a' is not a number"),
    "ball radius inf": (lambda: ws.Ball(X[0], INF), "the ball's radius is inf"),
    "ball centre": (lambda: ws.Ball(None, 0.1), "the ball's centre is a NoneType"),
    "ball centre NaN": (lambda: ws.Ball(X[0] * NAN, 0.1), "centre contains NaN"),
    "ball domain": (lambda: ws.Ball(X[0], 0.1, 2, "foo"), "domain 'foo' is not a box"),
    "threat": (lambda: ws.Threat(), "a threat needs eps"),
    "threat norm": (lambda: ws.Threat(7, 1, 0.1), "norm 7"),
    "threat order": (lambda: ws.Threat(INF, "W_2", 0.1), "order 'W_2' is not a number"),
    "threat order None": (lambda: ws.Threat(INF, None, 0.1), "order None is not a number"),
    "threat order 0": (lambda: ws.Threat(INF, 0, 0.1), "order 0 is below 1"),
    "threat eps None": (lambda: ws.Threat(INF, 1, None), "eps None is not a number"),
    "threat eps negative": (lambda: ws.Threat(INF, 1, -1), "eps is -1"),
    "threat eps list": (lambda: ws.Threat(INF, 1, [0.1]), "eps [0.1] is not a number"),
    "threat eps percent": (lambda: ws.Threat(INF, 1, "3%"), "eps '3%' is not a number"),
    "threat eps True": (lambda: ws.Threat(INF, 1, True), "eps True is not a number"),
    "threat domain": (lambda: ws.Threat(INF, 1, 0.1, "foo"), "domain 'foo' is not a box"),
    "threat kappa": (lambda: ONE.radius(0), "kappa is 0"),
    "w-pgd order": (lambda: ws.w_pgd(MODEL, X, Y, ONE), "no direction at order 1"),
    "apgd loss": (lambda: ws.apgd(MODEL, X, Y, POINT, loss="x"), "unknown loss 'x'"),
    "apgd steps": (lambda: ws.apgd(MODEL, X, Y, POINT, steps=2.5), "steps is 2.5"),
    "apgd no steps": (lambda: ws.apgd(MODEL, X, Y, POINT, steps=0), "steps=0"),
    "pgd steps": (lambda: ws.pgd(MODEL, X, Y, POINT, steps="a"), "steps is 'a'"),
    "pgd restarts": (lambda: ws.pgd(MODEL, X, Y, POINT, restarts=0), "restarts=0"),
    "pgd target": (lambda: ws.pgd(MODEL, X, Y, POINT, target=Y), "target"),
    "wda kappa": (lambda: ws.wda(MODEL, X, Y, ONE, kappa=0.5), "kappa is 0.5"),
    "wda kappa text": (lambda: ws.wda(MODEL, X, Y, ONE, kappa="a"), "kappa 'a' is not a number"),
    "wda topk": (lambda: ws.wda(MODEL, X, Y, ONE, topk=0), "topk is 0"),
    "wda step": (lambda: ws.wda(MODEL, X, Y, ONE, step=0), "step is 0"),
    "wda++ search": (lambda: ws.wda_pp(MODEL, X, Y, ONE, search="x"), "search is 'x'"),
    "wda++ steps": (lambda: ws.wda_pp(MODEL, X, Y, ONE, steps=0), "steps is 0"),
    "a3 step": (lambda: ws.a3(MODEL, X, Y, POINT, step="x"), "unknown step 'x'"),
    "a3 restarts": (lambda: ws.a3(MODEL, X, Y, POINT, restarts=2.5), "restarts is 2.5"),
    "square queries": (lambda: ws.square(MODEL, X, Y, POINT, queries=0), "queries=0"),
    "autoattack": (lambda: ws.AutoAttack(MODEL, norm="L7", eps=0.1), "unknown norm 'L7'"),
    "autoattack eps": (lambda: ws.AutoAttack(MODEL, norm="Linf", eps=-1), "eps is -1"),
    "allocate": (lambda: ws.allocate(None, 0.1, 1), "the flips are None"),
    "allocate tensor": (lambda: ws.allocate(FLIPS.distances, 0.1, 1), "the flips are a Tensor"),
    "allocate eps": (lambda: ws.allocate(FLIPS, 0, 1), "eps is 0"),
    "allocate order": (lambda: ws.allocate(FLIPS, 0.1, "w1"), "order 'w1'"),
    "allocate mu": (lambda: ws.allocate(FLIPS, 0.1, 1, torch.ones(2)), "mu must hold 6"),
    "curve None": (lambda: ws.risk_curve(None), "the flips are None"),
    "curve swapped": (lambda: ws.risk_curve(RADII, FLIPS), "the flips are a Radii"),
    "curve radii": (lambda: ws.risk_curve(FLIPS, [0.1] * 6), "the radii are a list"),
    "curve lengths": (lambda: ws.risk_curve(FLIPS, torch.zeros(2)), "radii must hold 6"),
    "curve norms": (
        lambda: ws.risk_curve(FLIPS, dataclasses.replace(RADII, norm=2.0)),
        "differ in norm",
    ),
    "curve eps": (lambda: ws.risk_curve(FLIPS)("a"), "eps 'a' is not a number"),
    "curve eps negative": (lambda: ws.risk_curve(FLIPS)(-1), "eps is -1"),
    "points": (lambda: ws.Flips.from_points(MODEL, X, Y, None, INF), "the points are a NoneType"),
    "points shape": (lambda: ws.Flips.from_points(MODEL, X, Y, X[:3], INF), "one point a sample"),
    "points NaN": (lambda: ws.Flips.from_points(MODEL, X, Y, X * NAN, INF), "the points contain"),
    "merge": (lambda: FLIPS.merge(None), "what is merged is None"),
    "merge norms": (
        lambda: FLIPS.merge(dataclasses.replace(FLIPS, norm=2.0)),
        "differ in norm",
    ),
    "knapsack": (lambda: ws.knapsack(torch.tensor([-1.0]), 0.1, 1), "numbers >= 0"),
    "knapsack NaN": (lambda: ws.knapsack(torch.tensor([NAN]), 0.1, 1), "numbers >= 0"),
    "knapsack text": (lambda: ws.knapsack("a", 0.1, 1), "the distances are a str"),
    "cost": (
        lambda: transport_cost(torch.ones(3), torch.ones(2), torch.ones(3), 1),
        "have shapes (3,), (2,) and (3,)",
    ),
    "samples needed": (lambda: ws.samples_needed(0), "width is 0"),
    "samples needed text": (lambda: ws.samples_needed("a"), "width 'a' is not a number"),
    "landmarks": (lambda: ws.landmarks(MODEL, X, Y, INF, shifts=["rain"]), "unknown shift 'rain'"),
    "landmarks norm": (lambda: ws.landmarks(MODEL, X, Y, 7), "norm 7"),
    "compare": (lambda: ws.compare(1, 2, ONE), "a run is a int"),
    "compare threat": (lambda: ws.compare(1, 2, 0.1), "the threat is 0.1"),
    "load": (lambda: ws.Evaluation.load("nowhere"), "holds no run"),
    "load None": (lambda: ws.Evaluation.load(None), "the run is None"),
    "flips file": (lambda: ws.Flips.load("nowhere.safetensors"), "cannot read"),
    "zoo": (lambda: ws.zoo.load("digit"), "did you mean"),
    "zoo None": (lambda: ws.zoo.load(None), "unknown model None"),
    "zoo data": (lambda: ws.zoo.data("cifar"), "unknown data set 'cifar'"),
    "one logit": (lambda: ws.OneLogit(MODEL)(X), "models with one output"),
    "smooth slope": (lambda: ws.paper_smooth_slope(MODEL, 9), "norm 9"),
}
TWO = ws.Threat(2, 1, 0.5)
NOISY = ws.smoothed(MODEL, 0.25, draws=100)
BOX = ws.Threat(INF, 1, 0.1, domain=(torch.zeros(3), torch.ones(3)))


def sandwich(threat: Any = ONE, x: Any = X, y: Any = Y, **more: Any) -> Any:
    return ws.sandwich(MODEL, x, y, threat, **{"effort": 1e-6, **more})


def noisy(model: Any = NOISY, **more: Any) -> Any:
    return ws.attack_smoothed(model, X, Y, **more)


def robust(threat: Any = ONE, y: Any = Y, **more: Any) -> Any:
    return ws.robust_loss(MODEL, X, y, threat, **more)


def certified(model: Any = MODEL, threat: Any = ONE, **more: Any) -> Any:
    return ws.certified_loss(model, X, Y, threat, **more)


# What both sides together, smoothing, hardening and tables of features are given.
CASES |= {
    "sandwich threat": (lambda: sandwich("0.1"), "the threat is '0.1'"),
    "sandwich gap": (lambda: sandwich(gap="small"), "gap 'small' is not a number"),
    "sandwich gap in points": (lambda: sandwich(gap=2), "gap is 2: give a fraction"),
    "sandwich gap NaN": (lambda: sandwich(gap=NAN), "gap is NaN"),
    "sandwich effort": (lambda: sandwich(effort=-1), "effort is -1"),
    "sandwich time": (lambda: sandwich(time_limit=0), "time_limit is 0"),
    "sandwich flips": (lambda: sandwich(flips=[0.1] * 6), "flips is a list: give Flips"),
    "sandwich radii": (lambda: sandwich(start=[0.1] * 6), "start is a list: give Radii"),
    "sandwich flips of others": (lambda: sandwich(x=X[:3], y=Y[:3], flips=FLIPS), "differ in x"),
    "sandwich flips in linf": (lambda: sandwich(TWO, flips=FLIPS), "differ in norm"),
    "radii upper": (lambda: radii(upper=FLIPS), "upper is a Flips: give Tensor, the distances"),
    "radii upper list": (lambda: radii(upper=[1.0] * 6), "upper is a list"),
    "radii upper NaN": (lambda: radii(upper=torch.full((6,), NAN)), "upper must hold 6 distances"),
    "radii start of others": (
        lambda: radii(x=X[:3], y=Y[:3], start=RADII, arithmetic="exact"),
        "6 radii",
    ),
    "radii workers": (lambda: radii(method="exact", workers="two"), "workers is 'two'"),
    "radii no workers": (lambda: radii(method="exact", workers=0), "0 workers"),
    "smoothed sigma": (lambda: ws.smoothed(MODEL, 0), "sigma is 0"),
    "smoothed sigma text": (lambda: ws.smoothed(MODEL, "some"), "sigma 'some' is not a number"),
    "smoothed draws": (lambda: ws.smoothed(MODEL, 0.1, draws=150), "draws is 150"),
    "smoothed average": (lambda: ws.smoothed(MODEL, 0.1, average=0), "average is 0"),
    "smoothed name": (lambda: ws.smoothed("digits-mlp", 0.1).certify(X, Y), "the model is a str"),
    "attack on the bare model": (lambda: noisy(MODEL), "the model is a Sequential: give Smoothed"),
    "attack confidence": (lambda: noisy(confidence=99.9), "confidence is 99.9"),
    "attack stretches": (lambda: noisy(stretches=[]), "stretches must be positive"),
    "robust threat": (lambda: robust(0.1), "the threat is 0.1"),
    "robust loss": (lambda: robust(loss="mse"), "unknown loss 'mse'"),
    "robust reach": (lambda: robust(reach=[]), "reach is ()"),
    "robust steps": (lambda: robust(steps=2.5), "steps is 2.5"),
    "robust price": (lambda: robust(price=3), "price is a int: give Price"),
    "robust labels": (lambda: robust(y=Y.float()), "the labels are float32"),
    "price rate": (lambda: ws.Price("fast"), "rate 'fast' is not a number"),
    "certified threat": (lambda: certified(threat="8/255"), "the threat is '8/255'"),
    "certified price": (lambda: certified(price=0.1), "price is a float"),
    "certified function": (lambda: certified(lambda x: MODEL(x)), "needs an nn.Sequential"),
    "certified generator": (lambda: certified(generator=3), "a generator draws balls"),
    "population": (lambda: ws.risk_curve(FLIPS).population(95), "confidence is 95"),
    "features text": (lambda: ws.Features("a", "b"), "low is 'a'"),
    "features upside down": (lambda: ws.Features([1.0], [0.0]), "low at or below high"),
    "features scale": (lambda: ws.Features([0.0], [1.0], "m"), "scale is 'm'"),
    "threat scale": (lambda: ws.Threat(INF, 1, 0.1, scale="m"), "scale 'm' is not a number"),
    "threat scale image": (lambda: ws.Threat(INF, 1, 0.1, scale=X[0, 0]), "scale has more than"),
    "box for images": (lambda: evaluate(threat=BOX), "samples of shape (F,)"),
    "data dict": (lambda: evaluate(data={"x": X, "y": Y}), "the data are a dict"),
    "data generator": (lambda: evaluate(data=(b for b in [(X, Y)])), "generator is no data"),
    "deepfool overshoot": (lambda: ws.deepfool(MODEL, X, Y, POINT, overshoot=-1), "overshoot is"),
    "save to a number": (lambda: FLIPS.save(3), "the file is 3"),
    "save nowhere": (lambda: FLIPS.save("no/where.safetensors"), "cannot write"),
    "order with a letter": (lambda: ws.Threat(INF, "p=1", 0.1), "order 'p=1' is not a number"),
    "norm negative": (lambda: nearest(norm=-INF), "norm -inf is not supported"),
    "norm True": (lambda: nearest(norm=True), "norm True is not supported"),
    "seed None": (lambda: nearest(seed=None), "seed is None"),
    "half weights": (lambda: nearest(ws.zoo.load("digits-mlp").half()), "half precision (float16)"),
    "class": (lambda: nearest(nn.Linear), "missing 1 required positional argument"),
    "swapped": (lambda: nearest(x=Y, y=X), "the samples are int64"),
}
CASES |= {
    f"{function.__name__}: {name}": (lambda f=function, g=given: f(**g), words)
    for function in (nearest, radii)
    for name, (given, words) in DATA.items()
}
CASES |= {
    f"{function.__name__}: model, {name}": (lambda f=function, m=model: f(m), words)
    for function in (nearest, radii, evaluate)
    for name, (model, words) in MODELS.items()
}
CASES |= {
    f"nearest: model, {name}": (lambda m=model: nearest(m), words)
    for name, (model, words) in NEAREST.items()
}
FUNCTIONS = sorted({attack.home.split(":")[1] for attack in ATTACKS.values()} & set(ws.__all__))
for attack in FUNCTIONS:
    run = getattr(ws, attack)
    CASES |= {
        f"{attack}: threat number": (lambda f=run: f(MODEL, X, Y, 0.1), "the threat is 0.1"),
        f"{attack}: threat text": (lambda f=run: f(MODEL, X, Y, "8/255"), "the threat is '8/255'"),
        f"{attack}: labels": (lambda f=run: f(MODEL, X, None, POINT), "the labels are None"),
        f"{attack}: batch": (lambda f=run: f(MODEL, X, Y, POINT, batch_size=0), "batch_size is 0"),
        f"{attack}: seed": (lambda f=run: f(MODEL, X, Y, POINT, seed="a"), "seed is 'a'"),
    }


@pytest.mark.few(114)
@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_sentence_with_cause_and_fix(case: str) -> None:
    call, words = CASES[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ws.InputError) as found:
            call()
    said = str(found.value)
    assert words in said, said
    assert "\n" not in said and said[-1] in ".?", said
    assert any(mark in said for mark in (": ", "; ", ", ")), said  # the fix follows the cause


@pytest.mark.parametrize("call", [nearest, radii, evaluate])
def test_inference_mode_around_a_call(call: Callable[[], Any]) -> None:
    with torch.inference_mode(), pytest.raises(ws.InputError, match="move it out, or use"):
        call()
    with torch.no_grad():
        assert call() is not None


def test_one_attack_by_its_name() -> None:
    run = evaluate(attacks="nearest", passes=12, look=False)
    assert run.methods == ("nearest",)


def test_the_table_is_as_long_as_it_should_be() -> None:
    assert len(CASES) >= 150
