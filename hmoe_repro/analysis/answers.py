"""Stub."""
from typing import NamedTuple
class PageAnswer(NamedTuple):
    claim: object
    part: object
    text: str
    finding: str
def page_answer(claims, profile, studies, store=""):
    return None
