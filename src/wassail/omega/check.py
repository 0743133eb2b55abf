"""A check of an answer that believes nothing it says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from wassail.certificates.prove.verify import verify
from wassail.omega.answer import Certificate, OmegaAnswer
from wassail.omega.judge import Judge
from wassail.omega.losses import curve_of, peaks_of
from wassail.omega.plan import Plan
from wassail.omega.property import Omega
from wassail.threat import Domain, Threat, box_at, fitted

SAMPLED = 20  # samples whose radius or peak is proved again, by default
BATCH = 16
EFFORTS = (0.1, 2.0, 20.0)  # seconds for each sample, counted in operations


@dataclass(frozen=True)
class OmegaCheck:
    """What a check found.

    Args:
        confirmed: all that the answer says and that was looked at is true.
        problems: what is false.
        open: what could be neither confirmed nor refuted.
        done: what was confirmed.
    """

    problems: tuple[str, ...]
    open: tuple[str, ...]
    done: tuple[str, ...]

    @property
    def confirmed(self) -> bool:
        """Whether nothing is false or left open."""
        return not self.problems and not self.open


def check_answer(
    property_: Omega, answer: OmegaAnswer, *, again: int | None = SAMPLED, seed: int = 0
) -> OmegaCheck:
    """Whether an answer is true.

    A plan is computed again: masses, costs, box and labels exactly, the network in float64, in
    float32 and by onnxruntime. What follows from a certificate is computed again exactly, and its
    radii or peaks are proved again.

    Args:
        property_: that it is about.
        answer: as `read_answer` returns it.
        again: how many samples are proved again, drawn at random; None for all; default 20.
        seed: int, of the draw; default 0.
    """
    if answer.plan is not None:
        return _plan(property_, answer, answer.plan)
    if answer.certificate is not None:
        return _certificate(property_, answer, answer.certificate, again, seed)
    return OmegaCheck((), ("the answer is unknown: there is nothing to check",), ())


def _plan(property_: Omega, answer: OmegaAnswer, plan: Plan) -> OmegaCheck:
    problems = plan.problems(property_)
    if problems:
        return OmegaCheck(tuple(problems), (), ())
    judge = Judge(property_)
    value = judge.value(plan)
    accuracy = property_.least
    side = "at most" if accuracy else "at least"
    text = f"{property_.measure} {side} {float(value):.9g} in {', '.join(judge.names)}"
    if property_.kept_by(value):
        return OmegaCheck((f"the plan has {text}, which does not refute the claim",), (), ())
    beyond = _beyond(answer.bounds[1 if accuracy else 0], value, at_least=not accuracy)
    return OmegaCheck(beyond, (), (f"a distribution of the threat has {text}",))


def _beyond(stated: float, value: Fraction, *, at_least: bool) -> tuple[str, ...]:
    """A problem if the answer states a bound that does not follow from what it holds."""
    if (stated <= value) if at_least else (stated >= value):
        return ()
    side = "at least" if at_least else "at most"
    return (f"the answer says {side} {stated:.9g}, and {float(value):.9g} follows",)


def _certificate(
    property_: Omega,
    answer: OmegaAnswer,
    certificate: Certificate,
    again: int | None,
    seed: int,
) -> OmegaCheck:
    value = certificate.value(property_)
    accuracy = property_.least
    side = "at least" if accuracy else "at most"
    text = f"{property_.measure} {side} {float(value):.9g} follows from the certificate"
    if not property_.kept_by(value):
        return OmegaCheck((f"only {text}, which does not prove the claim",), (), ())
    count = len(property_.y)
    claimed = torch.arange(count)
    if certificate.radii is not None:
        stated = torch.tensor(certificate.radii, dtype=torch.float64)
        claimed = (stated > 0).nonzero()[:, 0]
    rows = claimed
    if again is not None and again < len(claimed):
        draw = torch.randperm(len(claimed), generator=torch.Generator().manual_seed(seed))
        rows = claimed[draw[:again]].sort().values
    prove = _radii if accuracy else _peaks
    false, left = prove(property_, certificate, rows)
    what = "radii" if accuracy else "peaks"
    problems = _beyond(answer.bounds[0 if accuracy else 1], value, at_least=accuracy)
    if false:
        problems += (f"{false} of {len(rows)} {what} are false: a point in them is wrong",)
    open_ = [f"{left} of {len(rows)} {what} could not be proved again"] if left else []
    done = [text, f"{len(rows) - false - left} of {len(claimed)} {what} were proved again"]
    return OmegaCheck(problems, tuple(open_), tuple(done))


def _radii(property_: Omega, certificate: Certificate, rows: Tensor) -> tuple[int, int]:
    """How many radii have a flip within them, and how many could not be proved."""
    assert certificate.radii is not None
    threat = property_.threat
    stated = torch.tensor(certificate.radii, dtype=torch.float64)
    # Nothing beyond these is used.
    most = threat.eps if threat.order == math.inf else math.inf
    stated = stated.clamp(max=min(most, threat.label_cost))
    stated = torch.where(torch.isinf(stated), _covering(property_), stated)
    endless = torch.isinf(stated[rows])  # nothing is wrong in all of R^n: no ball proves that
    false, left = 0, rows[~endless]
    for effort in EFFORTS:
        still = []
        for part in torch.split(left, BATCH) if len(left) else ():
            at = stated[part]
            plain = Threat(threat.norm, math.inf, float(at.max()), _box(property_, part))
            given = (property_.model, property_.x[part], property_.y[part], plain)
            found = verify(*given, arithmetic=certificate.arithmetic, at=at, effort=effort)
            bad = torch.tensor([status in ("falsified", "wrong") for status in found.status])
            false += int(bad.sum())
            still.append(part[~(found.proved | bad)])
        left = torch.cat(still) if still else left[:0]
    return false, len(left) + int(endless.sum())


def _box(property_: Omega, rows: Tensor) -> Domain:
    return box_at(fitted(property_.threat.domain, property_.x), rows)


def _covering(property_: Omega) -> Tensor:
    """For each sample a radius whose ball holds all of the box, inf on R^n, `(N,)`."""
    domain = fitted(property_.threat.domain, property_.x)
    x = property_.x.double()
    if domain is None:
        return torch.full((len(x),), math.inf, dtype=torch.float64)
    low, high = domain
    far = torch.maximum(x - low, high - x).flatten(1)
    found: Tensor = torch.linalg.vector_norm(far, property_.threat.norm, 1)
    return found * (1 + 1e-6)


def _peaks(property_: Omega, certificate: Certificate, rows: Tensor) -> tuple[int, int]:
    """None is refuted; how many peaks could not be proved."""
    assert certificate.peaks is not None
    stated = torch.tensor(certificate.peaks, dtype=torch.float64)
    left = 0
    for part in torch.split(rows, 16 * BATCH) if len(rows) else ():
        curve = curve_of(
            property_,
            part,
            grid=certificate.grid,
            steps=certificate.steps,
            arithmetic=certificate.arithmetic,
        )
        found = peaks_of(curve, property_.threat.eps, certificate.multiplier)
        left += int((~(found <= stated[part])).sum())
    return 0, left
