"""Each feature in each back end: enforced, or refused with its path. The table in the docs says what came out here."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from bough.constrained.prepare import prepare
from bough.core.errors import RequestError
from tests.constrained.feature_cases import CASES, Case
from tests.constrained.walks import BACKEND_NAMES, accepts, matcher_of
from tests.fakes.grammar_specs import json_schema_spec

PAGE = Path(__file__).parents[2] / "docs" / "structured-output.md"
BEGIN, END = "<!-- features: written by tests/constrained/test_features.py -->", "<!-- end of features -->"


def enforced(case: Case, backend: str) -> bool:
    """Whether the back end takes the case; if it does, it must allow the good texts and none of the bad ones."""
    try:
        matcher = matcher_of(case.spec, backend)
    except RequestError as error:
        assert error.field and len(str(error)) > 20
        return False
    for text in case.good:
        assert accepts(matcher, text), f"{case.feature}: {text} is valid, and {backend} cannot write it"
    for text in case.bad:
        assert not accepts(matcher, text), f"{case.feature}: {text} is invalid, and {backend} allows it"
    return True


def test_the_table_in_the_docs_is_what_was_measured() -> None:
    rows = [["feature", *BACKEND_NAMES], ["---"] * 4]
    for case in CASES:
        rows.append([case.feature, *("yes" if enforced(case, backend) else "refused" for backend in BACKEND_NAMES)])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
    page = PAGE.read_text()
    written = re.search(f"{re.escape(BEGIN)}\n(.*?){re.escape(END)}", page, re.DOTALL)
    assert written is not None
    if os.environ.get("BOUGH_WRITE_TABLES"):
        PAGE.write_text(page[: written.start(1)] + table + page[written.end(1) :])
        return
    assert written[1] == table, "run this test with BOUGH_WRITE_TABLES=1 to write the table anew"


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_what_is_refused_is_told_by_its_path(backend: str) -> None:
    schema = {"type": "object", "properties": {"a/b": {"type": "array", "uniqueItems": True}}, "required": ["a/b"]}
    with pytest.raises(RequestError, match=r"json_schema#/properties/a~1b/uniqueItems cannot be enforced.*strict"):
        prepare(json_schema_spec(schema), backend)
    (warning,) = prepare(json_schema_spec(schema, strict=False), backend).warnings
    assert warning.startswith("json_schema#/properties/a~1b/uniqueItems")
