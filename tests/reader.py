"""Reads a page of the report as a browser would, without one."""

import html.parser
import json


class Reader(html.parser.HTMLParser):
    """Collects the tags and the words of a page, the cells of the rows that have an id, and the JSON in it."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.within, self.data = [], [], None, None
        self.rows, self.row = {}, None  # id -> cells; those of the row that is open
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.within = tag, dict(attributes)
        self.tags.append(self.within)
        if tag == "tr" and "id" in self.within[1]:
            self.row = self.rows.setdefault(self.within[1]["id"], [])
        elif tag in ("th", "td") and self.row is not None:
            self.row.append("")

    def handle_endtag(self, tag):
        if tag == "tr":
            self.row = None

    def handle_data(self, text):
        tag, attributes = self.within or ("", {})
        if attributes.get("id") == "data":
            self.data = json.loads(text) if self.data is None else self.data
        elif tag not in ("script", "style"):
            self.words.append(text)
            if self.row:
                self.row[-1] += text.strip()
