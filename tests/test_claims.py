"""docs/log/claims.md: computed again from the printed numbers, and complete."""

import re
from typing import NamedTuple

import pytest
from conftest import ROOT
from scipy import stats

from lab.board.rules import holm

RESULTS = (ROOT / "docs/results.md").read_text()
CLAIMS_TEXT = (ROOT / "docs/log/claims.md").read_text()
README = (ROOT / "README.md").read_text()
NUMBER = re.compile(r"[+-]?\d+\.\d+\s±\s\d+\.\d+")
FREEDOM = {"1": 125, "3": 2, "5": 4}  # with one seed by files, of which large has 126
FILES_WITH_ONE_SEED = {"prose": 12}
WIDER = {"standard": 1.2}  # intervals that take texts of one file as independent: by files at most so much wider
SEEDS = {"large": "1", "standard": "3"}  # where the table has no such column
TOLERANCE = 0.02


class Number(NamedTuple):
    """A value with its interval of 95 % as printed, which counts with its rounding against a claim."""

    value: float
    half: float
    rounding: float  # half of the last digit
    freedom: int
    wider: float = 1.0

    @property
    def error(self):
        return self.wider * (self.half + self.rounding) / stats.t.ppf(0.975, self.freedom)

    def p_of_zero(self):
        least = max(abs(self.value) - self.rounding, 0)
        return 2 * stats.t.sf(least / self.error, self.freedom)

    def p_of_loss(self, of_gain):
        """One-sided, of a loss of TOLERANCE or more. A gain is a loss with its sign changed."""
        loss = -self.value if of_gain else self.value
        most = loss + self.rounding
        return stats.t.sf((TOLERANCE - most) / self.error, self.freedom)

    def is_printed_as(self, other):
        """Whether another number, rounded as this one and without a sign, is the same."""
        differences = abs(abs(other.value) - abs(self.value)), abs(other.half - self.half)
        return max(differences) <= 1.02 * self.rounding


def parsed(text, seeds, place=""):
    """The number that is printed as "+0.12 ± 0.03" on a page."""
    value, _, half = text.split()
    digits = value.partition(".")[2]
    freedom = FREEDOM[seeds]
    if seeds == "1" and place in FILES_WITH_ONE_SEED:
        freedom = FILES_WITH_ONE_SEED[place] - 1
    return Number(float(value), float(half), 0.5 * 10.0 ** -len(digits), freedom, WIDER.get(place, 1.0))


def section(text, heading):
    _, rest = re.split(rf"\n##+ {re.escape(heading)}\n", text)
    return re.split(r"\n##+ ", rest)[0]


def rows(text):
    """The rows of the first table, by column."""
    table = text[text.index("\n|") :].strip().split("\n\n")[0]
    header, _, *lines = table.splitlines()
    columns = [cell.strip() for cell in header.split("|")[1:-1]]
    found = []
    for line in lines:
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        found.append(dict(zip(columns, cells, strict=True)))
    return found


def column_of(place, name, seeds):
    """The number of each row in a column; `seeds` where the table does not say how many there are."""
    text = (ROOT / f"docs/log/{place}.md").read_text()
    column = {}
    for row in rows(text[text.index("\n|  |") :]):
        if "±" in row[name]:
            column[row[""]] = parsed(row[name], row.get("seeds", seeds), place)
    return column


def corrected(column):
    """The p-value of each row that the difference is 0, by Holm's method."""
    p_values = holm([number.p_of_zero() for number in column.values()])
    return dict(zip(column, p_values, strict=True))


def computed(claim):
    """The p-value of a claim."""
    number = parsed(claim["number"], claim["seeds"], claim["table"])
    if claim["table"]:
        column = column_of(claim["table"], claim["column"], claim["seeds"])
        assert column[claim["row"]] == number
    if claim["test"] == "within":
        return number.p_of_loss(of_gain=claim["column"].startswith("gain"))
    if not claim["table"]:  # its column is not printed
        return min(number.p_of_zero() * int(claim["rows"]), 1.0)
    assert len(column) == int(claim["rows"])
    return corrected(column)[claim["row"]]


def passing(condition):
    """The rows of a table for which one condition of a claim about all rows holds."""
    place, column_name, test = re.fullmatch(r"(.*), (.*): (.*)", condition).groups()
    column = column_of(place, column_name, SEEDS.get(place))
    if test == "loses nothing":
        return [row for row, number in column.items() if number.p_of_loss(of_gain=True) <= 0.05]
    sign = {"gains": 1, "is better": -1}[test]
    p_values = corrected(column)
    return [row for row, number in column.items() if sign * number.value > 0 and p_values[row] <= 0.05]


CLAIMS = rows(CLAIMS_TEXT.split("\n## ")[0])
# The columns of tables that claims were picked from.
PICKED_FROM = {(claim["table"] or claim["rows"], claim["column"], claim["seeds"]) for claim in CLAIMS}
ABOUT_ALL_ROWS = rows(section(CLAIMS_TEXT, "Claims about all rows"))


def in_a_word(claim, p):
    """Whether a claim stands."""
    if p > 0.05:
        return "no"
    if "(provisional)" in claim["claim"]:
        return "these weights only"
    return "yes" if p * len(PICKED_FROM) <= 0.05 else "in its column"


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim['claim']}, {claim['seeds']} seeds")
def test_a_claim_has_the_p_value_that_follows_from_its_table(claim):
    p = computed(claim)

    assert claim["p"] == ("< 0.001" if p < 0.001 else f"{p:.3f}")
    assert claim["stands"] == in_a_word(claim, p)


@pytest.mark.parametrize("claim", ABOUT_ALL_ROWS, ids=lambda claim: claim["claim"])
def test_a_claim_about_all_rows_names_those_that_meet_its_conditions(claim):
    first, *others = [passing(condition) for condition in claim["conditions"].split("; ")]
    found = [row for row in first if all(row in other for other in others)]

    assert claim["for"] == ", ".join(found or ["none"])


def test_every_number_of_the_conclusions_is_a_claim_with_a_test():
    claimed = [parsed(claim["number"], claim["seeds"]) for claim in CLAIMS]
    summary = README[: README.index("## What you get")]
    # A table that is made of results and the output of an example claim nothing.
    summary = re.sub(r"<!-- made by.*?<!-- end -->|```.*?```", "", summary, flags=re.DOTALL)
    for text in NUMBER.findall(section(RESULTS, "Conclusions") + summary):
        number = parsed(text, "1")
        assert any(number.is_printed_as(other) for other in claimed), f"{text} has no test"


def test_every_number_of_the_answer_is_a_claim_or_cited():
    """The README's first table has no intervals: each number stands with one in claims.md, or on a page of the log."""
    claimed = {abs(parsed(claim["number"], "1").value) for claim in CLAIMS}
    cited = " ".join(page.read_text() for page in (ROOT / "docs/log").glob("*.md"))
    for line in README.split("## Try it")[0].splitlines():
        if line.startswith("|"):
            without_sources = re.sub(r"\]\(.*?\)", "", line)
            for number in re.findall(r"\b0\.\d{3}\b", without_sources):
                assert float(number) in claimed or ("](" in line and number in cited), number
