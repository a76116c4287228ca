"""Whether two answers come to the same result, by their texts alone.

It stands in for the verifier model of R2R's paper and for the answer checkers of CITER's tasks:
answers with numbers are compared by their last one, others by their words.
"""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def result_of(text: str) -> str:
    """The last number in ``text``; without one its words in lower case."""
    found = _NUMBER.findall(text)
    if found:
        return str(float(found[-1].replace(",", "")))
    return " ".join(text.lower().split())
