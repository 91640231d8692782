"""The report: an answer in words, figures and tables, as one self-contained page, Markdown, CSV."""

import json
import math
import warnings
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import pandas as pd

from ropewalk.files import write_text
from ropewalk.report import markdown as words_of
from ropewalk.report.answer import Column, answer, find
from ropewalk.report.charts import PALETTE, Styles, figure, line_styles, training
from ropewalk.report.comparison import BEST_POSSIBLE, SHOWN_AS_GAINS, Key, Table, tables
from ropewalk.report.figure import STYLE, Figure, svg
from ropewalk.report.frame import PROVENANCE, Runs, differing, load
from ropewalk.report.grids import Grid, numbers, overview, settings_of

PAGE = "report.html"
OPEN_MAPS = 8  # more heat maps are collapsed
LONG = 30  # characters of a cell of words; numbers with their intervals are shorter
HIDDEN = ("name", "seed", "runs_dir", "eval.", "trainer.log_every")  # options that explain no difference between lines


class Section(NamedTuple):
    title: str
    words: dict[str, list[str]]  # heading -> sentences in Markdown
    figures: list[Figure]
    grids: list[Grid]  # the first one is open on the page
    heat: list[Grid]  # percent or bits by length and depth, in colours
    others: list["Section"]  # the same measures with other settings, collapsed
    styles: Styles


def heat_maps(table: Table) -> list[Grid]:
    """Return what RULER found by depth and length for each line, as the mean over the tasks with a depth."""
    if table.kind != "ruler":
        return []
    grids = []
    parts_at: dict[float, list[str]] = {}
    for name, part in table.parts.items():
        if not math.isnan(part.depth):
            parts_at.setdefault(part.depth, []).append(name)
    for line in table.lines.index:
        rows: dict[str, dict[str, float]] = {}
        for depth in sorted(parts_at):
            row = rows.setdefault(f"{depth:.2f}", {})
            for length in table.lengths:
                means = [table.means.get(Key(line, name, length)) for name in parts_at[depth]]
                values = [e.value for e in means if e is not None]
                if values:
                    row[f"{length:,}"] = sum(values) / len(values)
        if rows:
            grids.append(Grid(f"{line}: {table.unit} by depth and length", pd.DataFrame.from_dict(rows, "index")))
    return grids


def grids_of(table: Table) -> list[Grid]:
    """Return the tables of text for a table; none for those that are read as a figure or a gain."""
    if table.kind == "by_position" or (table.kind, table.quantity) in SHOWN_AS_GAINS:
        return []
    return numbers(table)


def what_was_run(runs: Runs) -> list[Grid]:
    """Return the commands that made the numbers, and what was left out."""
    grids = []
    if len(runs.results):
        files = runs.results.drop_duplicates(["path", "file"])
        commands = files[PROVENANCE].value_counts().rename("results").reset_index()
        # The first column is narrow on a phone, so the commit leads: its first digits name it.
        commands["commit"] = commands.commit.str[:10]
        commands = commands.set_index("commit")
        grids.append(Grid("Commands that made the numbers", commands))
    left_out = pd.DataFrame(runs.left_out, columns=["run", "why"]).set_index("run")
    grids.append(Grid("Left out: broken, not finished, or there twice", left_out))
    return grids


def differences(runs: Runs, section: str) -> Grid:
    """Return the options in which the lines of a section differ, with the runs of each."""
    rows: dict[str, Column] = {}
    of_section = runs.runs[runs.runs.section == section]
    configs = [runs.configs[path] for path in of_section.index]
    for label, group in of_section.groupby("label"):
        config = runs.configs[group.index[0]]
        row = {"runs": ", ".join(group["name"])}
        # Options of encodings are compared among those of the same name.
        of_same = differing([other for other in configs if other["pe.name"] == config["pe.name"]])
        for key in differing(configs):
            is_hidden = key.startswith((*HIDDEN, "training."))
            if key.startswith("pe."):
                is_hidden = key not in of_same
            if not is_hidden:
                row[key] = _option(config.get(key))
        rows[str(label)] = row
    frame = pd.DataFrame.from_dict(rows, "index").fillna("")
    return Grid("In what the lines differ, and the runs of each", frame)


def _option(value: Any) -> str:
    """Return the value of an option in words; "" for none."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value)


def costs(runs: Runs, section: str) -> dict[str, Column]:
    """Return the columns of what each line as trained costs."""
    columns: dict[str, Column] = {}
    of_section = runs.runs[runs.runs.section == section]
    headings = {
        "parameters": "parameters",
        "tokens/s in training": "tokens_per_s",
        "peak memory, MB": "peak_memory_mb",
    }
    for heading, name in headings.items():
        medians = of_section.groupby("label")[name].median().dropna()
        if len(medians):
            columns[heading] = {str(label): f"{value:,.0f}" for label, value in medians.items()}
    return columns


def sections(runs: Runs, reference: str = "rope") -> list[Section]:
    """Return a section for each data set and train_len, those with most lines first, and one on what was run."""
    by_title: dict[str, list[Table]] = {title: [] for title in runs.runs.section.unique()}
    for table in tables(runs, reference):
        by_title[table.section].append(table)

    # In order: by the number of lines, text before tasks, and by training length.
    facts = runs.runs.groupby("section").agg(lines=("group", "nunique"), train_len=("train_len", "first"))
    tasks = {title: any(table.task for table in of_section) for title, of_section in by_title.items()}

    def order(title: str) -> tuple:
        return -facts.lines[title], tasks[title], facts.train_len[title], title

    result = []
    for title in sorted(by_title, key=order):
        of_section = by_title[title]
        # Tables come with most lines and texts first. Those of the same measure with other settings are collapsed.
        main: dict[tuple[str, str], Table] = {}
        others = []
        for table in of_section:
            if main.setdefault((table.kind, table.quantity), table) is not table:
                others.append(table)

        # Colours are the same in all tables and figures of a section.
        styles = line_styles(of_section)
        configs = [runs.configs[path] for path in runs.runs.index[runs.runs.section == title]]
        tolerance = float(configs[0].get("eval.tolerance", 0))
        section = _section_of(title, list(main.values()), styles, tolerance)

        # The overview comes first, and then in what the lines differ.
        section.grids[:0] = overview(list(main.values()), costs(runs, title))
        section.grids.insert(1, differences(runs, title))
        section.figures.append(training(runs, title, find(of_section, "lengths")))

        for table in others:
            words = f"{table.kind.replace('_', ' ')}, {table.quantity}: {settings_of(table)}"
            section.others.append(_section_of(words, [table], styles, tolerance)._replace(words={}))
        result.append(section)
    result.append(Section("What was run", {}, [], what_was_run(runs), [], [], {}))
    return result


def _section_of(title: str, of_section: Sequence[Table], styles: Styles, tolerance: float) -> Section:
    """Return tables in words, figures and grids."""
    section = Section(title, answer(of_section, tolerance), [], [], [], [], styles)
    for table in of_section:
        section.grids.extend(grids_of(table))
        section.heat.extend(heat_maps(table))
        drawn = figure(table)
        if drawn:
            section.figures.append(drawn)
    return section


def html(runs: Runs, reference: str = "rope") -> str:
    """Return one page that needs no other file."""
    summary = [f"Runs: {len(runs.runs):,}; left out: {len(runs.left_out)}."]
    links = []
    parts = []
    for i, section in enumerate(sections(runs, reference)):
        links.append(f'<a href="#s{i}">{escape(section.title)}</a>')
        parts.append(_section(section, f"s{i}"))
    summary.append(" · ".join(links))
    title = "Which position encoding, and how far?"
    if len(runs.runs) == 1:
        title = runs.runs["name"].iloc[0]
    here = Path(__file__).parent
    colours = "".join(f".c{i} {{ --colour: {colour}; }}\n" for i, colour in enumerate(PALETTE))
    return Template((here / "page.html").read_text(encoding="utf-8")).substitute(
        page_css=(here / "page.css").read_text(encoding="utf-8") + colours,
        page_js=(here / "page.js").read_text(encoding="utf-8"),
        title=escape(title),
        lead=" ".join(summary),
        body="\n".join(parts),
    )


def _section(section: Section, name: str, *, nested: bool = False) -> str:
    """Return a section as HTML: the answer, the first figure, the tables, and the other figures."""
    answers = ""
    for heading, sentences in section.words.items():
        lines = "<br>".join(words_of.to_html(sentence) for sentence in sentences)
        # A number and its interval stay on one line.
        lines = lines.replace(" ± ", "&nbsp;±&nbsp;")
        answers += f"<dt>{heading}</dt><dd>{lines}</dd>"
    figures = _figures(section, name)
    grids = [_table(grid, section.styles, is_open=i == 0) for i, grid in enumerate(section.grids)]
    heat = _heat_maps(section.heat)
    others = ""
    for i, other in enumerate(section.others):
        inner = _section(other, f"{name}-o{i}", nested=True)
        others += f"<details><summary>Other settings: {escape(other.title)}</summary>{inner}</details>"
    # A section of other settings stands within its own section, which has the heading and the chips.
    head = "" if nested else f'<h2 id="{name}">{escape(section.title)}</h2><dl>{answers}</dl>{_chips(section.styles)}'
    return f"<section>{head}{''.join(figures[:1] + grids + figures[1:])}{heat}{others}</section>"


def _figures(section: Section, name: str) -> list[str]:
    """Return the figures of a section as HTML, without those that have no point."""
    figures = []
    for i, drawn in enumerate(section.figures):
        panels = ""
        for j, panel in enumerate(drawn.panels):
            panels += svg(panel, section.styles, f"{name}-{i}-{j}")
        if panels:
            note = f"<small>{escape(drawn.note)}</small>"
            caption = f"<figcaption>{escape(drawn.title)}{note}</figcaption>"
            figures.append(f'<figure>{caption}<div class="panels">{panels}</div></figure>')
    return figures


def _chips(styles: Styles) -> str:
    """Return a button for each line that shows or hides it; none for one or two lines."""
    shown = [line for line in styles if line != BEST_POSSIBLE]
    if len(shown) <= 2:
        return ""
    buttons = [f'<button class="{styles[line]}" aria-pressed="true">{escape(line)}</button>' for line in shown]
    return f'<div class="chips" aria-label="show or hide lines">{"".join(buttons)}</div>'


def _heat_maps(grids: Sequence[Grid]) -> str:
    """Return grids of numbers with their cells in colours: percent from 0 to 100, bits from 0 to the largest of all."""
    if not grids:
        return ""
    # One scale for all lines, or their colours could not be compared; at least a bit, or noise would be coloured.
    bits = [float(grid.frame.max().max()) for grid in grids if "percent" not in grid.title]
    most_bits = max([1.0, *bits])
    maps = "".join(_heat(grid, 100.0 if "percent" in grid.title else most_bits) for grid in grids)
    details = "details open" if len(grids) <= OPEN_MAPS else "details"
    return f"<{details}><summary>RULER by depth and length</summary><div class='heats'>{maps}</div></details>"


def _heat(grid: Grid, largest: float) -> str:
    """Return a grid of numbers with its cells in colours, from 0 to `largest`."""
    head = "".join(f"<th>{escape(str(column))}</th>" for column in grid.frame)
    rows = ""
    for depth, row in grid.frame.iterrows():
        cells = ""
        for value in row:
            share = 0 if math.isnan(value) else min(100.0, max(0.0, 100 * value / largest))
            number = f"{value:z.0f}" if largest >= 100 else f"{value:z.2f}"
            cells += f'<td style="--share:{share:.0f}%">{number}</td>'
        rows += f"<tr><th>{depth}</th>{cells}</tr>"
    table = f"<table><thead><tr><th>depth</th>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="heat"><p>{escape(grid.title)}</p>{table}</div>'


def _table(grid: Grid, styles: Styles, is_open: bool) -> str:
    """Return a table as HTML, with the colour of each line before it and the best cells in bold."""
    head = "".join(f"<th>{escape(str(column))}</th>" for column in grid.frame)
    rows = ""
    for label, *cells in grid.frame.itertuples(name=None):
        style = styles.get(str(label).rpartition(": ")[2], "")
        marker = f'<i class="{style}">●</i> ' if style else ""
        row = f"<th>{marker}{escape(str(label))}</th>"
        for column, cell in zip(grid.frame, cells, strict=True):
            text = escape(str(cell))
            if (label, column) in grid.best:
                text = f"<b>{text}</b>"
            # Long words begin on the left, where a reader looks for them.
            start = '<td class="words">' if len(text) > LONG else "<td>"
            row += f"{start}{text}</td>"
        rows += f"<tr>{row}</tr>"
    table = f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>"
    title = escape(grid.title)
    scroll = f'<div class="scroll" tabindex="0" role="region" aria-label="{title}">{table}</div>'
    details = "details open" if is_open else "details"
    return f"<{details}><summary>{title}</summary>{scroll}</details>"


def markdown(runs: Runs, reference: str = "rope") -> str:
    """Return the same words and tables, without figures."""
    lines = []
    for section in sections(runs, reference):
        lines += [f"## {words_of.escaped(section.title)}", ""]
        for heading, sentences in section.words.items():
            lines += [f"- {heading}: {sentence}" for sentence in sentences]
        for title, frame, _ in section.grids:
            lines += ["", f"{words_of.escaped(title)}.", ""]
            lines += words_of.table(["", *frame.columns], frame.itertuples(name=None))
        lines.append("")
    return "\n".join(lines)


def picture(runs: Runs, reference: str = "rope") -> str:
    """Return the first figure's first panel as an SVG of its own: for text the gain over cutting it.

    Raises ValueError: nothing was measured that has a figure.
    """
    colours = "".join(f".line.c{i}{{color:{colour}}}" for i, colour in enumerate(PALETTE))
    for section in sections(runs, reference):
        for drawn in section.figures:
            for panel in drawn.panels:
                return svg(panel, section.styles, "0", STYLE + colours)
    raise ValueError("nothing to draw: no run has results")


def csv(runs: Runs, reference: str = "rope") -> str:
    """Return a row for each estimate: the means, differences and gains of every quantity, line, part and length."""
    rows = []
    for table in tables(runs, reference):
        of_table = {
            "section": table.section,
            "train_len": table.train_len,
            "kind": table.kind,
            "quantity": table.quantity,
            "unit": table.unit,
            "reference": table.reference,
            "eval": json.dumps(table.eval),
        }
        columns = {"mean": table.means, "difference": table.differences, "behind": table.behind, "gain": table.gains}
        columns |= {"above the optimum": table.excess, "share of the possible gain": table.shares}
        for name, estimates in columns.items():
            for key, e in estimates.items():
                part = table.parts[key.part]._asdict()
                # The names that the columns of `ropewalk.runs` have, too.
                part["span_start"] = part.pop("first")
                part["span_end"] = part.pop("last")
                rows.append(key._asdict() | part | {"estimate": name} | e._asdict() | of_table)
    return pd.DataFrame(rows).map(_no_formula).to_csv(index=False) if rows else ""


def _no_formula(cell: Any) -> Any:
    """Return a cell of a table; a text that a spreadsheet would compute begins with an apostrophe."""
    is_formula = isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t"))
    return f"'{cell}" if is_formula else cell


def write_beside(run: Path) -> Path:
    """Write report.html of one run into its directory, and return where to look. A failure only warns."""
    try:
        write_text(run / PAGE, html(load(run)))
    except Exception as error:
        # The measurements are worth more than their picture: a bug here must not fail the run.
        warnings.warn(f"{PAGE} was not written: {error}", stacklevel=2)
        return run
    return run / PAGE
