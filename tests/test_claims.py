"""docs/log/claims.md: computed again from the printed numbers, and complete."""

import re
from pathlib import Path

import pytest
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
RESULTS = (ROOT / "docs/results.md").read_text()
CLAIMS_TEXT = (ROOT / "docs/log/claims.md").read_text()
README = (ROOT / "README.md").read_text()
NUMBER = r"([+-]?)(\d+\.\d+)\s±\s(\d+\.\d+)"
FREEDOM = {"1": 127, "3": 2, "5": 4}
TOLERANCE = 0.02


def section(text, heading):
    return re.split(r"\n##+ ", re.split(rf"\n##+ {re.escape(heading)}\n", text)[1])[0]


def rows(text):
    """The rows of the first table, by column."""
    lines = [line.strip().removeprefix("|").removesuffix("|") for line in text.splitlines() if line.startswith("|")]
    header, _, *cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [dict(zip(header, line, strict=True)) for line in cells]


def parse(text):
    """Value, half width, and the half of the last printed digit."""
    sign, value, half = re.fullmatch(NUMBER, text).groups()
    return float(sign + value), float(half), 0.5 * 10.0 ** -len(value.split(".")[1])


def p_value(text, freedom):
    value, half, rounding = parse(text)
    error = (half + rounding) / stats.t.ppf(0.975, freedom)
    return 2 * stats.t.sf(max(abs(value) - rounding, 0) / error, freedom)


def holm(p, others):
    """The adjusted p-value of `p`, of a family of `others` and itself: the largest on the way to it."""
    adjusted = 0.0
    family = sorted([p, *others])
    for rank, smaller in enumerate(family[: family.index(p) + 1]):
        adjusted = max(adjusted, smaller * (len(family) - rank))
    return min(adjusted, 1.0)


def column_of(place, name, seeds):
    """The number and the seeds of each row in a column; `seeds` where the table does not say how many there are."""
    text = (ROOT / f"docs/log/{place}.md").read_text()
    lines = rows(text[text.index("|  |") :].split("\n\n")[0])
    column = {}
    for line in lines:
        if "±" in line[name]:
            column[line[""]] = (line[name], line.get("seeds", seeds))
    return column


def within(number, freedom, *, of_gain):
    """The one-sided p-value of a loss of TOLERANCE or more."""
    value, half, rounding = parse(number)
    # A gain is a loss with its sign changed.
    loss = -value if of_gain else value
    error = (half + rounding) / stats.t.ppf(0.975, freedom)
    return stats.t.sf((TOLERANCE - loss - rounding) / error, freedom)


def computed(claim):
    freedom = FREEDOM[claim["seeds"]]
    column = {}
    if claim["table"]:  # else it is not printed
        column = column_of(claim["table"], claim["column"], claim["seeds"])
        assert column[claim["row"]] == (claim["number"], claim["seeds"])
    if claim["test"] == "within":
        return within(claim["number"], freedom, of_gain=claim["column"].startswith("gain"))
    p = p_value(claim["number"], freedom)
    if not column:
        return min(p * int(claim["rows"]), 1.0)
    assert int(claim["rows"]) == len(column)
    others = []
    for row, (number, seeds) in column.items():
        if row != claim["row"]:
            others.append(p_value(number, FREEDOM[seeds]))
    return holm(p, others)


def passing(condition):
    """The rows of a table for which one condition of a claim about all rows holds."""
    place, column_name, test = re.fullmatch(r"(.*), (.*): (.*)", condition).groups()
    column = column_of(place, column_name, SEEDS.get(place))
    numbers = {row: (number, FREEDOM[seeds]) for row, (number, seeds) in column.items()}
    if test == "loses nothing":
        return [row for row, of_row in numbers.items() if within(*of_row, of_gain=True) <= 0.05]
    sign = {"gains": 1, "is better": -1}[test]
    p_values = {row: p_value(*of_row) for row, of_row in numbers.items()}
    found = []
    for row, p in p_values.items():
        others = [other for name, other in p_values.items() if name != row]
        if sign * parse(numbers[row][0])[0] > 0 and holm(p, others) <= 0.05:
            found.append(row)
    return found


CLAIMS = rows(CLAIMS_TEXT.split("\n## ")[0])
ABOUT_ALL_ROWS = rows(section(CLAIMS_TEXT, "Claims about all rows"))
SEEDS = {"large": "1", "standard": "3"}  # where the table has no such column


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim['claim']}, {claim['seeds']} seeds")
def test_a_claim_has_the_p_value_that_follows_from_its_table(claim):
    p = computed(claim)
    shown = "< 0.001" if p < 0.001 else f"{p:.3f}"
    assert (claim["p"], claim["stands"]) == (shown, "yes" if p <= 0.05 else "no")


@pytest.mark.parametrize("claim", ABOUT_ALL_ROWS, ids=lambda claim: claim["claim"])
def test_a_claim_about_all_rows_names_those_that_meet_its_conditions_and_no_others(claim):
    first, *others = [passing(condition) for condition in claim["conditions"].split("; ")]
    found = [row for row in first if all(row in other for other in others)]
    assert ", ".join(found or ["none"]) == claim["for"]


def test_every_number_of_the_conclusions_is_a_claim_with_a_test():
    claimed = [parse(claim["number"]) for claim in CLAIMS]
    summary = README[: README.index("## What you get")]
    # A table that is made of results and the output of an example claim nothing.
    summary = re.sub(r"<!-- made by.*?<!-- end -->|```.*?```", "", summary, flags=re.DOTALL)
    for text in (section(RESULTS, "Conclusions"), summary):
        for _, value, half in re.findall(NUMBER, text):
            unit = 10.0 ** -len(value.split(".")[1])
            assert any(
                abs(abs(mean) - float(value)) <= 0.51 * unit and abs(width - float(half)) <= 0.51 * unit
                for mean, width, _ in claimed
            ), f"{value} ± {half} has no test"


def test_every_number_of_the_answer_is_a_claim_or_cited():
    """The README's first table has no intervals: each number stands with one in claims.md, or on a page of the log."""
    claimed = {abs(parse(claim["number"])[0]) for claim in CLAIMS}
    cited = " ".join(page.read_text() for page in (ROOT / "docs/log").glob("*.md"))
    for line in README.split("## Try it")[0].splitlines():
        if line.startswith("|"):
            without_sources = re.sub(r"\]\(.*?\)", "", line)
            for number in re.findall(r"\b0\.\d{3}\b", without_sources):
                assert float(number) in claimed or ("](" in line and number in cited), number


def test_holm_by_hand():
    assert holm(0.01, [0.04, 0.02]) == pytest.approx(0.03)
    assert holm(0.03, [0.02, 0.01]) == pytest.approx(0.04)  # not less than a smaller one's
