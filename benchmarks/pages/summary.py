"""The first page of docs/results, and where the figures of the others come from."""

from __future__ import annotations

from benchmarks.pages.glance import glance
from benchmarks.pages.tables import Results, Row, code, field, markdown


def source(results: Results, stages: tuple[str, ...]) -> str:
    """Which stages the figures of a page come from."""
    done = [results.stages[stage] for stage in stages if stage in results.stages]
    named = (f"`{record['stage']}` ({units(record)} units)" for record in done)
    return f"\nMeasured by {', '.join(named)}: [how](index.md#stages).\n" if done else ""


def units(record: Row) -> str:
    """How many of its planned units a stage has run."""
    done, planned = record["units"]["done"], record["units"]["planned"]
    return f"{done} of {planned}" if done < planned else f"all {planned}"


def index(results: Results, about: dict[str, str]) -> str:
    """The six rows, the pages, and the state of every stage."""
    text = (
        "# Results\n\nEvery figure is computed by `make results` and read from `results/*.json`; a "
        "test fails when a page shows another one, or when the code behind it has changed since. "
        "Settings were chosen on images from 1,000 on, figures are for the first ones. Percentages "
        "in brackets are 95 % confidence limits (Clopper and Pearson) for images drawn like "
        "these.\n\n"
    )
    text += glance(results) + "\n"
    text += "\n".join(f"- [{name.capitalize()}]({name}.md): {line}" for name, line in about.items())
    rows = list(results.stages.values())
    if rows:
        columns = [
            ("stage", code("stage")),
            ("about", field("about")),
            ("units done", units),
            ("processor min", lambda r: f"{r['processor_seconds'] / 60:.0f}"),
            ("commit", lambda r: f"`{r['commit'][:12]}`"),
        ]
        text += f"\n\n## Stages\n\n{circumstances(rows)}\n\n" + markdown(columns, rows)
    else:
        text += "\n"
    return text


def circumstances(rows: list[Row]) -> str:
    """What was the same or different for the stages: seed, processor, versions."""
    seeds = ", ".join(sorted({str(row["seed"]) for row in rows}))
    processors = ", ".join(sorted({row["processor"] for row in rows}))
    pairs = sorted({pair for row in rows for pair in row["versions"].items()})
    versions = ", ".join(f"{name} {value}" for name, value in pairs)
    return (
        "`python -m benchmarks.results STAGE` measures one, into `results/STAGE.json`. One thread "
        f"of {processors}; seed {seeds}; {versions}."
    )
