"""A comparison as one HTML file that needs nothing else: tables to sort and filter, figures, configurations."""

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from conf.rundir import write_atomically
from conf.schema import flatten
from evaluation import charts
from evaluation.charts import Figure, Key
from evaluation.compare import QUANTITIES, Comparison, Line, Section, Spread, Table, compare, digest
from evaluation.runs import Run
from evaluation.tables import TRAINING, answers

CURVES = {  # of metrics.jsonl -> title, unit
    "train/loss": ("Training loss", "loss in nats per token"),
    "val/loss": ("Validation loss", "loss in nats per token"),
    "val/error": ("Validation error", "wrong tokens in percent"),
}
PAGE = "report.html"  # where none is named
RELOAD = 10  # seconds after which a live page looks for a newer one


def write(comparison: Comparison, out: Path, *, live: bool = False) -> None:
    """Write the page. `live`: it is going to be rewritten, and loads itself anew while it is open."""
    html = render(comparison, live=live)
    write_atomically(out, html.encode(errors="replace").decode())  # the name of a file may be no Unicode


def write_beside(run: Path) -> None:
    """Write the page of one complete run into its directory, and say so. Failing is only a warning."""
    out = run / PAGE
    try:
        write(compare([run]), out)
    except Exception as error:
        warnings.warn(f"{out} was not written: {error}", stacklevel=2)
    else:
        print(f"to look at: {out}")


def render(comparison: Comparison, *, live: bool = False) -> str:
    """The page. Nothing in it is markup but what stands in the template: names and values are escaped."""
    import jinja2
    from plotly.offline import get_plotlyjs

    key = Key(comparison)
    figures: dict[str, Figure] = {}
    sections = [_section(i, section, key, figures) for i, section in enumerate(comparison.sections)]
    names = Counter(run.name for run in comparison.runs)
    choices = defaultdict(list)  # a section's title -> its runs, by their place in `data`
    for i, (title, run) in enumerate((s.title, run) for s in comparison.sections for run in s.runs):
        choices[title].append((i, run.name if names[run.name] == 1 else str(run.path)))
    data = {
        "figures": {name: {"data": figure.data, "layout": figure.layout} for name, figure in figures.items()},
        **_configs(comparison.runs),
    }
    here = Path(__file__).parent
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return environment.from_string((here / "page.html").read_text(encoding="utf-8")).render(
        sections=sections,
        colours=key.colours,
        seeds=sorted({run.seed for run in comparison.runs}),
        facts=facts(comparison),
        title=comparison.runs[0].name if len(comparison.runs) == 1 else "Which position encoding?",
        n=len(comparison.runs),
        choices=choices,
        left_out=comparison.left_out,
        data=data,
        live=RELOAD if live else 0,
        written=datetime.now().astimezone().isoformat(" ", "seconds"),
        plotly=get_plotlyjs(),
        style=(here / "page.css").read_text(encoding="utf-8"),
        script=(here / "page.js").read_text(encoding="utf-8"),
    )


def facts(comparison: Comparison) -> dict[str, list[str]]:
    """What was run: a few lines under each heading, with the number of runs where they differ."""
    runs = [run for run in comparison.runs if run.results] or comparison.runs
    found: dict[str, list[str]] = {
        "Model": [_model(run) for run in runs],
        "Training": [_training(run) for run in runs],
        "Data": [_data(run) for run in runs],
        "Machine": [_machine(run) for run in runs],
        "Versions": [_versions(run) for run in runs],
    }
    result = {}
    for heading, lines in found.items():
        counts = Counter(lines)
        result[heading] = [line if len(counts) == 1 else f"{line} ({n} runs)" for line, n in counts.most_common()]
    return result


def _model(run: Run) -> str:
    size = f"{run.config.get('model.n_layer')} layers of {run.config.get('model.dim')} channels"
    if not run.training:
        return size
    counts = run.training.parameters
    return f"{size}, {counts.get('total', 0) - counts.get('position', 0):,} parameters without the encoding's"


def _training(run: Run) -> str:
    batch = f"{run.config.get('trainer.batch_size')} x {run.config['train_len']:,} tokens"
    tokens = f" ({run.training.tokens:,} in all)" if run.training else ""
    return f"{run.config['trainer.max_steps']:,} steps of {batch}{tokens}, learning rate {run.config.get('optim.lr')}"


def _data(run: Run) -> str:
    tokenizer = run.config.get("data.tokenizer")
    return (
        f"{run.config['data.name']}{f', tokenizer {tokenizer}' if tokenizer else ''}, identity {digest(run.identity)}"
    )


def _machine(run: Run) -> str:
    where = f"{run.environment.get('processor', 'unknown processor')}, {run.environment.get('cores')} cores"
    return where + (f", {run.training.device}, {run.training.precision}" if run.training else "")


def _versions(run: Run) -> str:
    packages = run.environment.get("packages")
    named = [("Python", run.environment.get("python")), *(packages.items() if isinstance(packages, dict) else ())]
    commit = str(run.environment.get("git_commit") or "unknown")[:10]
    changed = ", changed" if run.environment.get("git_changed") else ""
    return ", ".join(f"{name} {version}" for name, version in named[:3]) + f"; commit {commit}{changed}"


def _section(i: int, section: Section, key: Key, figures: dict[str, Figure]) -> dict[str, Any]:
    """What the template needs of a section; its figures are added to `figures`."""

    def add(found: Iterable[Figure], unit: int | None = None) -> list[tuple[str, Figure, int | None]]:
        drawn = [(f"f{len(figures) + n}", figure) for n, figure in enumerate(f for f in found if f.data)]
        figures.update(drawn)
        return [(name, figure, unit) for name, figure in drawn]

    tables = []
    for table in section.tables:
        shown = []
        for unit, quantity in enumerate(table.quantities):
            shown += add(
                [charts.by_length(table, name, quantity, section.train_len, key) for name in table.slices], unit
            )
        shown += [] if table.measure.task else add([charts.by_position(table, section.train_len, key)])
        tables.append(_table(table, section, key) | {"figures": shown})
    curves = [charts.training(section, metric, *words, key) for metric, words in CURVES.items()]
    return {
        "id": f"s{i}",
        "title": section.title,
        "answers": answers(section),
        "tables": tables,
        "figures": add([*curves, charts.frequencies(section, key)]),
        "passkeys": add(charts.passkeys(section, key)),
    }


def _table(table: Table, section: Section, key: Key) -> dict[str, Any]:
    """Its columns come once for each quantity; the reader chooses which are shown."""
    shapes = [(name, length) for name in table.slices for length in table.measure.lengths]
    columns = [(quantity, *shape) for quantity in table.quantities for shape in shapes]
    means = [[line.spread(name, length, quantity) for line in table.lines] for quantity, name, length in columns]
    best = [min(found) if len(found := [s.mean for s in column if s]) > 1 else None for column in means]
    rows = []
    for line in table.lines:
        for seed in (None, *line.seeds):
            cells = []
            for (quantity, name, length), least in zip(columns, best, strict=True):
                value = line.spread(name, length, quantity, seed)
                is_best = seed is None and value is not None and value.mean == least
                cells.append(_cell(value, QUANTITIES[quantity][1], is_best))
            cells += [_cell(line.group.training(name, line.seeds if seed is None else [seed]), 0) for name in TRAINING]
            rows.append(_row(line, seed, key) | {"cells": cells})
    _, tokens, sequences = table.measure.amounts[0]
    return {
        "task": table.measure.task,
        "units": [QUANTITIES[quantity][0] for quantity in table.quantities],
        "tokens": tokens,
        "sequences": sequences,
        "slices": table.slices,
        "lengths": [(length, length / section.train_len) for length in table.measure.lengths],
        "training": list(TRAINING.values()),
        "rows": rows,
        "columns": len(shapes),  # of each quantity
        "sorted": len(shapes) + 1 if len(table.slices) == 1 else None,  # the column the rows are ordered by
    }


def _row(line: Line, seed: int | None, key: Key) -> dict[str, Any]:
    return {
        "id": key.row(line, seed),
        "encoding": line.encoding,
        "look": key.look(line),
        "label": line.label,
        "seed": "" if seed is None else seed,
        "seeds": ", ".join(map(str, line.seeds)) if seed is None else seed,
    }


def _cell(spread: Spread | None, decimals: int, best: bool = False) -> dict[str, Any]:
    mean, _, half_range = ("-" if spread is None else spread.format(decimals)).partition(" ± ")
    value = spread.mean if spread and math.isfinite(spread.mean) else ""  # sorted last
    return {"value": value, "mean": mean, "half_range": half_range, "best": best}


def _configs(runs: Sequence[Run]) -> dict[str, Any]:
    """The settings and the environment of each run as text: what all have in common, and what is each one's own."""
    every = [
        {name: str(value) for name, value in (run.config | flatten({"environment": run.environment})).items()}
        for run in runs
    ]
    names = list(dict.fromkeys(name for own in every for name in own))
    common = {name: every[0].get(name) for name in names if len({own.get(name) for own in every}) == 1}
    own = [{name: value for name, value in config.items() if name not in common} for config in every]
    return {"names": names, "common": common, "runs": own}
