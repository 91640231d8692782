"""The report: results as tables, their comparison, the answer in words, the page."""
