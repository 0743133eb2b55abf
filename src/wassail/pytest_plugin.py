"""Requirements on a model as pytest tests: `wassail_model.require("accuracy>=0.5 ... proved")`.

The run comes from `--wassail-run DIR`, from `wassail_run = DIR` in the configuration of pytest, or
from a fixture `wassail_run` of your own that returns an `Evaluation` or the path of a run.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation
    from wassail.evaluation.signoff import Verdict


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option and the setting that name a run."""
    text = "run directory of `wassail evaluate --out`, for the fixture wassail_model"
    parser.getgroup("wassail").addoption("--wassail-run", metavar="DIR", help=text)
    parser.addini("wassail_run", text, default="")


class RequiredModel:
    """A model that was evaluated, and what is required of it."""

    def __init__(self, evaluation: Evaluation) -> None:
        self.evaluation = evaluation

    def require(self, requirement: str) -> Verdict:
        """Fail the test unless the requirement holds; return the verdict.

        Args:
            requirement: see `Evaluation.require`.
        """
        __tracebackhide__ = True
        verdict = self.evaluation.require(requirement)
        if not verdict:
            pytest.fail(str(verdict), pytrace=False)
        return verdict


@pytest.fixture(scope="session")
def wassail_run(request: pytest.FixtureRequest) -> Any:
    """The run that is asked about: a path or an `Evaluation`. Override it to evaluate a model."""
    folder = request.config.getoption("--wassail-run") or request.config.getini("wassail_run")
    if not folder:
        pytest.fail(
            "there is no run: give --wassail-run DIR, set wassail_run in the configuration of "
            "pytest, or define a fixture wassail_run that returns ws.evaluate(...).",
            pytrace=False,
        )
    return folder


@pytest.fixture(scope="session")
def wassail_model(wassail_run: Evaluation | str | PathLike[str]) -> RequiredModel:
    """The evaluated model: `wassail_model.require("accuracy>=0.5 at eps 2/255 proved")`."""
    from wassail.evaluation.run import Evaluation

    if isinstance(wassail_run, Evaluation):
        return RequiredModel(wassail_run)
    return RequiredModel(Evaluation.load(wassail_run))
