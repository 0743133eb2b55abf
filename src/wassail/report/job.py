"""What a workflow shows of a run: GitHub's job summary, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from wassail.evaluation.run import Evaluation
from wassail.evaluation.signoff import Verdict
from wassail.report.card import model_card


def job_summary(run: Evaluation, verdicts: Sequence[Verdict] = ()) -> str:
    """The answer first, then the section of the model card.

    verdicts: the requirements that were checked.
    """
    failed = sum(not verdict for verdict in verdicts)
    answer = f"{len(verdicts)} requirements hold" if verdicts else "no requirement was given"
    if failed:
        answer = f"{failed} of {len(verdicts)} requirements FAIL"
    return f"# wassail: {answer}\n\n{model_card(run, verdicts)}\n"
