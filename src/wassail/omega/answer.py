"""What was decided about a property of a distribution, with what it rests on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from wassail.errors import InputError, unknown
from wassail.omega.exact import error_peaks, shares_of, worst_mean
from wassail.omega.fields import Fields, read_json, shown
from wassail.omega.plan import Plan
from wassail.omega.property import Omega

FORMAT = "omega/1 answer"
STATUSES = ("holds", "fails", "unknown")
LARGEST = 256 << 20  # bytes of a file


@dataclass(frozen=True, eq=False)
class Certificate:
    """Why a property holds: one number for each sample, and a multiplier of the dual.

    With lam in units of the budget the error or the loss is at most `lam + mean of the worst share
    of peak_i`, and `peak_i >= sup_x [value(x) - lam (price / eps)^p]`. For accuracy the peaks
    follow from certified radii, so these are kept.

    Args:
        multiplier: lam >= 0; 0 at order inf.
        radii: for accuracy, of each sample, inf where nothing in the domain is wrong.
        peaks: for a loss, of each sample.
        proved_by: by which method each radius was proved, "" where it is 0.
        arithmetic: "executed" or "exact", as for `ws.radii`.
        grid: for a loss, the radii of the balls on which it was bounded.
        steps: for a loss, of the optimisation of its bounds.
    """

    multiplier: float
    radii: tuple[float, ...] | None = None
    peaks: tuple[float, ...] | None = None
    proved_by: tuple[str, ...] = ()
    arithmetic: str = "exact"
    grid: tuple[float, ...] = ()
    steps: int = 0

    def value(self, property_: Omega) -> Fraction:
        """The accuracy at least, or the loss at most, that follows, exactly.

        Args:
            property_: that it is about.
        """
        threat = property_.threat
        if property_.least:
            assert self.radii is not None
            given = (threat.eps, threat.order, threat.label_cost)
            peaks = error_peaks(self.radii, self.multiplier, *given)
        else:
            assert self.peaks is not None
            peaks = [Fraction(peak) for peak in self.peaks]
        mu = shares_of(property_.weights.tolist())
        mean = worst_mean(peaks, mu, Fraction(threat.subpopulation))
        total = Fraction(self.multiplier) + mean
        return 1 - total if property_.least else total

    def as_json(self) -> dict[str, Any]:
        """What a file holds."""
        found: dict[str, Any] = {"multiplier": self.multiplier, "arithmetic": self.arithmetic}
        if self.radii is not None:
            radii = ["inf" if radius == math.inf else radius for radius in self.radii]
            found |= {"radii": radii, "proved_by": list(self.proved_by)}
        if self.peaks is not None:
            found |= {"peaks": list(self.peaks), "grid": list(self.grid), "steps": self.steps}
        return found

    @classmethod
    def read(cls, value: Any, property_: Omega) -> Certificate:
        """A certificate out of a file, its kinds and lengths checked.

        Args:
            value: what stands there.
            property_: that it is about.
        """
        whole = property_.least
        own = ("radii", "proved_by") if whole else ("peaks", "grid", "steps")
        fields = Fields(value, "certificate", ("multiplier", "arithmetic", *own))
        multiplier = fields.real("multiplier")
        if not 0 <= multiplier < math.inf:
            raise InputError(f"the multiplier is {multiplier:g}: give a finite number >= 0.")
        if property_.threat.order == math.inf and multiplier:
            raise InputError("the multiplier is 0 at order inf: give that.")
        arithmetic = fields.text("arithmetic")
        if arithmetic not in ("executed", "exact"):
            raise unknown("arithmetic", shown(arithmetic), ("executed", "exact"))
        if whole:
            radii, names = _radii(fields.get("radii")), fields.get("proved_by")
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise InputError("proved_by of the certificate must be a list of texts.")
            _count((radii, names), property_)
            return cls(multiplier, tuple(radii), None, tuple(names), arithmetic)
        peaks, grid, steps = fields.reals("peaks"), fields.reals("grid", 0.0), fields.get("steps")
        _count((peaks,), property_)
        if not 0 < len(grid) <= 1000 or min(grid) <= 0 or type(steps) is not int:
            raise InputError("grid must be 1 to 1000 radii above 0, and steps a whole number.")
        if not 0 <= steps <= 1000:
            raise InputError(f"steps is {steps}: give a whole number from 0 to 1000.")
        return cls(multiplier, None, tuple(peaks), (), arithmetic, tuple(grid), steps)


def _radii(value: Any) -> list[float]:
    if not isinstance(value, list):
        raise InputError(f"radii of the certificate is {shown(value)}: give a list of numbers.")
    plain = [0.0 if radius == "inf" else radius for radius in value]
    known = Fields({"radii": plain}, "certificate", ("radii",)).reals("radii", 0.0)
    return [math.inf if radius == "inf" else k for radius, k in zip(value, known)]


def _count(lists: tuple[list[Any], ...], property_: Omega) -> None:
    if any(len(values) != len(property_.y) for values in lists):
        raise InputError(
            f"the certificate must have one entry for each of {len(property_.y)} samples."
        )


@dataclass(frozen=True, eq=False)
class OmegaAnswer:
    """The verdict on a property of a distribution.

    Args:
        status: "holds", "fails" or "unknown".
        bounds: what the measure is in the worst case, at least and at most.
        reason: why it is unknown, else "".
        plan: the distribution that refutes it; None without one.
        certificate: what proves it; None without one.
        checked: the evaluations that the plan holds in: "float64", "float32", "onnxruntime".
        seconds: of the clock.
        info: how much work it took.
    """

    status: str
    bounds: tuple[float, float]
    reason: str = ""
    plan: Plan | None = None
    certificate: Certificate | None = None
    checked: tuple[str, ...] = ()
    seconds: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)

    def as_json(self, property_: Omega) -> dict[str, Any]:
        """What a file holds.

        property_: that it is about.
        """
        found: dict[str, Any] = {
            "format": FORMAT,
            "property": property_.digest,
            "network": property_.network_digest,
            "status": self.status,
            "bounds": [value if math.isfinite(value) else str(value) for value in self.bounds],
        }
        if self.reason:
            found["reason"] = self.reason
        if self.plan is not None:
            found |= {"plan": self.plan.as_json(), "checked": list(self.checked)}
        if self.certificate is not None:
            found["certificate"] = self.certificate.as_json()
        return found | {"seconds": round(self.seconds, 3), "info": self.info}

    def __str__(self) -> str:
        return f"{self.status}: {self.reason}" if self.reason else self.status


def read_answer(path: str | Path, property_: Omega) -> OmegaAnswer:
    """An answer out of a file; nothing that it says is believed.

    property_: that it should be about.
    """
    path = Path(path)
    content, _ = read_json(path, "an answer", LARGEST)
    try:
        return _answer(content, property_)
    except InputError as error:
        raise error.within(str(path)) from None


def _bounds(value: Any) -> tuple[float, float]:
    """What the measure is said to be, at least and at most."""
    if isinstance(value, list) and len(value) == 2:
        try:
            low, high = map(float, value)
            if low <= high:
                return low, high
        except (TypeError, ValueError):
            pass
    raise InputError(f"bounds of the answer are {shown(value)}: give two numbers, the least first.")


def _answer(content: Any, property_: Omega) -> OmegaAnswer:
    needed = ("format", "property", "network", "status")
    optional = ("bounds", "reason", "plan", "checked", "certificate", "seconds", "info")
    fields = Fields(content, "the answer", needed, optional)
    fields.of_format(FORMAT)
    for key, digest in (("property", property_.digest), ("network", property_.network_digest)):
        if fields.get(key) != digest:
            raise InputError(f"the answer is about another {key}: give the one it was made for.")
    status = fields.get("status")
    if status not in STATUSES:
        raise unknown("status", shown(status), STATUSES)
    plan, certificate = fields.get("plan"), fields.get("certificate")
    if (status == "fails") != (plan is not None) or (status == "holds") != (
        certificate is not None
    ):
        raise InputError("an answer has a plan if it says fails, a certificate if it says holds.")
    return OmegaAnswer(
        status,
        _bounds(fields.get("bounds", ["-inf", "inf"])),
        plan=None if plan is None else Plan.read(plan, property_),
        certificate=None if certificate is None else Certificate.read(certificate, property_),
    )
