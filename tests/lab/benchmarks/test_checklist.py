"""A checklist keeps its time, prints as it goes, and goes on after a failure. Its clock is the test's."""

import pytest
import torch

from lab.benchmarks.checklist import Checklist
from lab.benchmarks.measure import reason_of


class Clock:
    """Seconds that pass only when a job spends them."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds

    def job(self, minutes, **cells):
        def run():
            self.seconds += 60 * minutes
            return cells

        return run


@pytest.fixture
def clock():
    return Clock()


def test_no_job_begins_after_its_time(clock, capsys):
    checklist = Checklist(10, clock)
    jobs = {name: clock.job(2, a=name.upper()) for name in ("one", "two", "three", "four")}
    rows = checklist.table("Numbers", ["a"], jobs, share=0.5)
    assert [row[""] for row in rows] == ["one", "two", "three"]  # the third begins after 4 minutes, and ends late
    assert checklist.left_out == {"Numbers": ["four"]}
    assert checklist.minutes_spent() == 6
    out = capsys.readouterr().out
    assert out == "\n## Numbers\n\n|  | a |\n| --- | --- |\n| one | ONE |\n| two | TWO |\n| three | THREE |\n"

    # What earlier parts left is for later ones, up to the end.
    checklist.part("Prose", lambda: clock.job(4)() or "text", share=1.0)
    checklist.part("More", lambda: "more", share=1.0)
    assert checklist.table("Late", ["a"], jobs, share=1.0) == []
    assert checklist.left_out == {"Numbers": ["four"], "More": [], "Late": list(jobs)}
    assert capsys.readouterr().out.count("Left out: no time.") == 2
    assert checklist.failed == []


def test_a_row_is_printed_before_the_next_job_begins(clock, capsys):
    printed = []

    def job():
        printed.append(capsys.readouterr().out)
        return {"a": str(len(printed))}

    def killed():
        printed.append(capsys.readouterr().out)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Checklist(10, clock).table("Numbers", ["a"], {"one": job, "two": job, "three": killed}, share=1.0)
    assert [text.splitlines()[-1] for text in printed] == ["| --- | --- |", "| one | 1 |", "| two | 2 |"]


@pytest.mark.parametrize(
    "failure", [torch.OutOfMemoryError("no memory | at all\nline 2"), MemoryError(), ValueError("x")]
)
def test_a_failure_is_one_row_and_is_counted(clock, capsys, failure):
    checklist = Checklist(10, clock)

    def fails():
        raise failure

    rows = checklist.table("Numbers", ["a", "b"], {"one": fails, "two": clock.job(1, a="1", b="2")}, share=1.0)
    assert rows == [{"": "two", "a": "1", "b": "2"}]
    checklist.part("Prose", fails, share=1.0)
    assert checklist.failed == ["Numbers: one", "Prose"]
    out, err = capsys.readouterr()
    lines = out.splitlines()
    message = {"OutOfMemoryError": "OutOfMemoryError: no memory \\| at all ... line 2", "MemoryError": "MemoryError"}
    expected = message.get(type(failure).__name__, "ValueError: x")
    assert f"| one | fails: {expected} |  |" in lines
    assert "| two | 1 | 2 |" in lines
    assert lines[-1].startswith("Fails: ")
    assert "Traceback" in err


def test_what_a_compiler_says_names_the_fault():
    """It prints code first, and of a call in a kernel the fault is in the cause."""
    failure = RuntimeError("at 2:4:\n    return dot(x, x)\n")
    failure.__cause__ = ValueError("code\nptxas fatal : too much\n\nRepro command: ptxas\n")
    assert reason_of(failure) == "ValueError: code ... ptxas fatal : too much"
    assert reason_of(MemoryError()) == "MemoryError"
