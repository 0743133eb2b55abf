"""The threat model: what people write, what is understood, and how refusals read."""

import dataclasses
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wassail.errors import InputError
from wassail.threat import (
    Threat,
    dual,
    number,
    parse_domain,
    parse_eps,
    parse_level,
    parse_norm,
    parse_order,
    show,
)

INF = math.inf
NAN = math.nan
quick = settings(deadline=None, max_examples=50, derandomize=True)


def refused(call, *args, names=(), **kwargs):
    """Calls, expects InputError (a ValueError), and checks that its message is one sentence
    that quotes `names`.
    """
    with pytest.raises(InputError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in message
    assert message.endswith(".")
    assert ". " not in message
    for name in names:
        assert name in message
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return message


# --------------------------------------------------------------------------------------------------
# number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8/255", 8 / 255),
        (" 8/255 ", 8 / 255),
        ("0.03", 0.03),
        ("1e-3", 1e-3),
        ("1E3", 1000.0),
        ("3", 3.0),
        ("-2.5", -2.5),
        ("inf", INF),
        ("Infinity", INF),
        ("∞", INF),
        (8, 8.0),
        (0.03, 0.03),
        (Fraction(8, 255), 8 / 255),
        (np.float32(0.5), 0.5),
        (INF, INF),
        (-INF, -INF),
    ],
)
def test_number_reads_what_people_write(text, value):
    found = number(text)
    assert found == value
    assert type(found) is float


@pytest.mark.parametrize(
    "value", ["1/0", "", "abc", "8/", "/255", "1/2/3", None, [1], (1, 2), {}, 1j, "nan", 10**400]
)
def test_number_refuses(value):
    message = refused(number, value, "eps", names=["eps", repr(value)])
    assert "8/255" in message  # the fix


def test_number_refuses_overflow_in_text():
    refused(number, "1e400", names=["'1e400'"])


@pytest.mark.parametrize("value", [NAN, np.float32("nan"), np.float64("nan")])
def test_number_refuses_nan(value):
    refused(number, value, "kappa", names=["kappa", "NaN"])


@given(st.floats(allow_nan=False, allow_infinity=False))
@quick
def test_number_round_trips(value):
    assert number(value) == value
    assert number(repr(value)) == value


@given(st.integers(-1000, 1000), st.integers(1, 1000))
@quick
def test_number_fractions_are_rounded_once(a, b):
    assert number(f"{a}/{b}") == a / b


# --------------------------------------------------------------------------------------------------
# eps


@pytest.mark.parametrize("value", ["8/255", 8 / 255, Fraction(8, 255)])
def test_eps(value):
    assert parse_eps(value) == 8 / 255


@pytest.mark.parametrize("value", [0, 0.0, "0", -1, "-8/255", INF, "inf", -INF, "0/3"])
def test_eps_must_be_positive_and_finite(value):
    refused(parse_eps, value, names=["eps", repr(value), "positive and finite"])


@pytest.mark.parametrize("value", ["1/0", "abc", None, NAN, "nan"])
def test_eps_must_be_a_number(value):
    refused(parse_eps, value, names=["eps"])


# --------------------------------------------------------------------------------------------------
# norm


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (1, 1.0),
        (2, 2.0),
        (INF, INF),
        (1.0, 1.0),
        (2.0, 2.0),
        ("1", 1.0),
        ("2", 2.0),
        ("inf", INF),
        ("Inf", INF),
        ("l1", 1.0),
        ("L1", 1.0),
        ("l2", 2.0),
        ("L2", 2.0),
        ("linf", INF),
        ("Linf", INF),
        ("LINF", INF),
        (" l2 ", 2.0),
        ("∞", INF),
        ("l∞", INF),
        ("2.0", 2.0),
        (np.float64(2), 2.0),
        (np.inf, INF),
        (Fraction(2), 2.0),
    ],
)
def test_norm(text, value):
    found = parse_norm(text)
    assert found == value
    assert type(found) is float


@pytest.mark.parametrize(
    "value", [0, 3, 1.5, -1, "l3", "l0", "", "l", "two", None, NAN, -INF, "-inf", True, [2]]
)
def test_norm_refuses(value):
    refused(parse_norm, value, names=["norm", repr(value), "1, 2 or inf"])


def test_dual_exponents():
    assert [dual(r) for r in (1.0, 2.0, INF)] == [INF, 2.0, 1.0]
    assert dual(1) == INF


# --------------------------------------------------------------------------------------------------
# order


@pytest.mark.parametrize(
    ("text", "value"),
    [(1, 1.0), (2, 2.0), (1.5, 1.5), ("3/2", 1.5), ("inf", INF), (INF, INF), (100, 100.0)],
)
def test_order(text, value):
    assert parse_order(text) == value


@pytest.mark.parametrize("value", [0, 0.999, -1, "1/2", -INF])
def test_order_below_one(value):
    refused(parse_order, value, names=["order", repr(value), "below 1"])


@pytest.mark.parametrize("value", ["two", None, NAN, "1/0"])
def test_order_must_be_a_number(value):
    refused(parse_order, value, names=["order"])


# --------------------------------------------------------------------------------------------------
# domain


@pytest.mark.parametrize(
    ("value", "box"),
    [
        (None, None),
        ((0, 1), (0.0, 1.0)),
        ([0, 1], (0.0, 1.0)),
        (("-1/2", "1/2"), (-0.5, 0.5)),
        (np.array([0, 255]), (0.0, 255.0)),
        ((-INF, 0), (-INF, 0.0)),
    ],
)
def test_domain(value, box):
    found = parse_domain(value)
    assert found == box
    assert found is None or (type(found) is tuple and all(type(v) is float for v in found))


@pytest.mark.parametrize("value", [(1, 0), (0, 0), [2, -2], (INF, INF)])
def test_domain_empty(value):
    refused(parse_domain, value, names=["domain", repr(value), "empty"])


@pytest.mark.parametrize("value", [5, 0.5, (0,), (), (0, 1, 2)])
def test_domain_not_a_box(value):
    refused(parse_domain, value, names=["domain", repr(value), "(low, high)"])


@pytest.mark.parametrize(
    ("value", "name"),
    [((0, "one"), "'one'"), ((None, 1), "None"), ((0, NAN), "NaN"), ("ab", "'ab'")],
)
def test_domain_with_a_wall_that_is_no_number(value, name):
    refused(parse_domain, value, names=["domain", name])


# --------------------------------------------------------------------------------------------------
# level


@pytest.mark.parametrize(("value", "level"), [(0, 0.0), (1, 1.0), ("1/2", 0.5), (0.05, 0.05)])
def test_level(value, level):
    assert parse_level(value, "alpha") == level


@pytest.mark.parametrize("value", [-0.1, 1.1, 50, "101/100", INF])
def test_level_outside(value):
    refused(parse_level, value, "alpha", names=["alpha", repr(value), "between 0 and 1"])


@pytest.mark.parametrize("value", ["half", NAN])
def test_level_must_be_a_number(value):
    refused(parse_level, value, "alpha", names=["alpha"])


# --------------------------------------------------------------------------------------------------
# show


@pytest.mark.parametrize("k", [1, 2, 4, 8, 16, 32])
def test_show_multiples_of_1_255(k):
    assert show(k / 255) == f"{k}/255"


@pytest.mark.parametrize("k", [3, 5, 6, 10, 12])
def test_show_multiples_of_1_255_that_can_be_reduced(k):
    assert show(k / 255) == f"{k}/255"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5"),
        (0.03, "0.03"),
        (1.0, "1"),
        (0.123456, "0.1235"),
        (INF, "inf"),
        (8 / 255 + 1e-6, "0.03137"),
    ],
)
def test_show_other_numbers(value, text):
    assert show(value) == text


@given(st.floats(1e-6, 1e3))
@quick
def test_show_can_be_read_back(value):
    assert number(show(value)) == pytest.approx(value, rel=1e-3)


# --------------------------------------------------------------------------------------------------
# Threat


def test_threat_parses_its_fields():
    box: Any = [0, 1]
    threat = Threat(norm="linf", order="1", eps="8/255", domain=box)
    assert (threat.norm, threat.order, threat.eps, threat.domain) == (INF, 1.0, 8 / 255, (0.0, 1.0))
    assert all(type(v) is float for v in (threat.norm, threat.order, threat.eps, *threat.domain))
    assert Threat(norm="L2", order=2, eps=0.5, domain=None).domain is None


def test_threat_defaults():
    threat = Threat(eps=0.1)
    assert (threat.norm, threat.order, threat.domain) == (INF, INF, (0.0, 1.0))


def test_threat_needs_eps():
    refused(Threat, names=["eps"])
    refused(Threat, eps=NAN, names=["eps"])
    refused(Threat, eps=np.float32("nan"), names=["eps"])


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"norm": 3}, ["norm", "3"]),
        ({"norm": "l7"}, ["norm", "'l7'"]),
        ({"order": 0.5}, ["order", "0.5"]),
        ({"order": NAN}, ["order", "NaN"]),
        ({"order": "p"}, ["order", "'p'"]),
        ({"eps": 0}, ["eps", "0"]),
        ({"eps": -0.25}, ["eps", "-0.25"]),
        ({"eps": INF}, ["eps", "inf"]),
        ({"eps": "1/0"}, ["eps", "'1/0'"]),
        ({"eps": None}, ["eps", "None"]),
        ({"domain": (1, 0)}, ["domain", "(1, 0)"]),
        ({"domain": 7}, ["domain", "7"]),
        ({"domain": (0, NAN)}, ["domain", "NaN"]),
    ],
)
def test_threat_refuses_in_one_sentence(fields, names):
    refused(Threat, **{"eps": 0.1, **fields}, names=names)


def test_threat_is_frozen():
    threat = Threat(eps=0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        threat.eps = 0.2
    assert dataclasses.replace(threat, eps="1/5").eps == 0.2  # type: ignore[arg-type]
    refused(dataclasses.replace, threat, eps=-1, names=["-1"])


def test_threat_equality_and_hash():
    a = Threat(norm="linf", order=1, eps="8/255")
    box: Any = [0, 1]
    b = Threat(norm=INF, order="1", eps=8 / 255, domain=box)
    assert a == b
    assert hash(a) == hash(b)
    others = [
        Threat(norm=2, order=1, eps="8/255"),
        Threat(norm=INF, order=2, eps="8/255"),
        Threat(norm=INF, order=1, eps="4/255"),
        Threat(norm=INF, order=1, eps="8/255", domain=None),
    ]
    assert all(a != other for other in others)
    assert len({a, b, *others}) == 5


@pytest.mark.parametrize(
    ("order", "kappa", "factor"),
    [(1, 4, 4.0), (2, 4, 2.0), (INF, 4, 1.0), (4, 16, 2.0), (1, 1, 1.0), (INF, 1e9, 1.0)],
)
def test_threat_radius(order, kappa, factor):
    threat = Threat(order=order, eps=0.5)
    assert threat.radius(kappa) == pytest.approx(0.5 * factor, rel=1e-14)
    assert type(threat.radius(kappa)) is float


@pytest.mark.parametrize("order", [1, 1.5, 2, INF])
def test_threat_radius_of_everyone_is_eps(order):
    assert Threat(order=order, eps="8/255").radius() == 8 / 255
    assert Threat(order=order, eps="8/255").radius(1) == 8 / 255


@given(st.floats(1, 50), st.floats(1, 1e4), st.floats(1e-3, 10))
@quick
def test_threat_radius_spends_the_budget(order, kappa, eps):
    # A fraction 1/kappa moves by the radius, the rest stays: the Wasserstein cost is eps.
    radius = Threat(order=order, eps=eps).radius(kappa)
    assert (radius**order / kappa) ** (1 / order) == pytest.approx(eps, rel=1e-9)
    assert radius >= eps * (1 - 1e-12)


def test_threat_repr():
    assert (
        repr(Threat(norm="inf", order=1, eps="8/255"))
        == "Threat(norm=inf, order=1, eps=8/255, domain=[0, 1])"
    )
    assert (
        repr(Threat(norm=2, order=1.5, eps=0.5, domain=None))
        == "Threat(norm=2, order=1.5, eps=0.5, domain=None)"
    )
    assert (
        repr(Threat(1, INF, 3, (-0.5, 255)))
        == "Threat(norm=1, order=inf, eps=3, domain=[-0.5, 255])"
    )


def test_threat_str():
    assert (
        str(Threat(norm="inf", order=1, eps="8/255"))
        == "Omega_1(8/255), ground norm linf, box [0, 1]"
    )
    assert (
        str(Threat(norm=2, order=INF, eps=0.5, domain=None))
        == "Omega_inf(0.5), ground norm l2, no box"
    )


@pytest.mark.parametrize("scale", [None, [1.0, 0.5]])
def test_a_box_for_each_feature_stays_when_another_field_changes(scale: list[float] | None) -> None:
    box: Any = ([0.0, 1.0], [2.0, 3.0])
    threat = Threat(INF, 1, 0.1, box, scale)
    other = dataclasses.replace(threat, label_cost=0.2)
    assert other.domain == threat.domain and other.label_cost == 0.2
