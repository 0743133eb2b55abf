"""Requirements on a model as pytest tests: `wassail_model.require("accuracy>=0.5 ... proved")`.

The run comes from `--wassail-run DIR`, from `wassail_run = DIR` in the configuration of pytest, or
from a fixture `wassail_run` of your own that returns an `Evaluation` or the path of a run.

A requirement that fails ends pytest with exit code 1, as any test. Where it could not be answered
the code is another one, with pytest's own meaning: 4 for bad input, 3 for an internal error.
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


_UNANSWERED = pytest.StashKey[int]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Note a test that asks for the model and ends in something else than a verdict."""
    from wassail.errors import InputError

    if call.excinfo is None or "wassail_model" not in getattr(item, "fixturenames", ()):
        return
    error = call.excinfo.value
    verdicts = (AssertionError, pytest.fail.Exception, pytest.skip.Exception)
    if isinstance(error, Exception) and not isinstance(error, verdicts):
        bad = isinstance(error, InputError)
        code = pytest.ExitCode.USAGE_ERROR if bad else pytest.ExitCode.INTERNAL_ERROR
        known = item.config.stash.get(_UNANSWERED, code)
        item.config.stash[_UNANSWERED] = min(known, code)  # an internal error counts more


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End with a code of its own if a requirement could not be answered."""
    code = session.config.stash.get(_UNANSWERED, None)
    if code is not None and session.exitstatus == pytest.ExitCode.TESTS_FAILED:
        session.exitstatus = code


class RequiredModel:
    """A model that was evaluated, and what is required of it."""

    def __init__(self, evaluation: Evaluation) -> None:
        self.evaluation = evaluation

    def require(self, requirement: str) -> Verdict:
        """Fail the test unless the requirement holds; return the verdict.

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
