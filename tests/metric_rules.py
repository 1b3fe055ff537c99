"""What Prometheus' critic (promtool check metrics) asks of a metrics page, and a little more."""

import re
from collections.abc import Iterator

DECLARED = re.compile(r"^# (HELP|TYPE) (\S+) ?(.*)$", re.MULTILINE)
SERIES = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? \S+$", re.MULTILINE)
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="(?:[^"\\]|\\.)*"')

TYPES = ("counter", "gauge", "histogram", "summary", "untyped")
OTHER_UNITS = re.compile(
    r"(^|_)(milliseconds?|microseconds?|nanoseconds?|minutes?|hours?|days?|weeks?|"
    r"(kilo|mega|giga|tera|kibi|mebi|gibi|tebi|milli|micro)?(bits?|grams?|meters?|volts?|amperes?|"
    r"joules?)|(kilo|mega|giga|tera|kibi|mebi|gibi|tebi)bytes?|percent|fahrenheit|kelvin)(_|$)"
)
"""Everything is told in seconds, bytes, ratios."""

SHORT_UNITS = frozenset(
    {"s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d"}
)
FEWEST_WORDS = 4


def faults(page: str) -> list[str]:
    """What is wrong with each metric of a page in the text form; nothing: promtool is silent."""
    declared = DECLARED.findall(page)
    helps = {name: text for what, name, text in declared if what == "HELP"}
    types = {name: text for what, name, text in declared if what == "TYPE"}
    found = [*_faults_of_labels(page, types)]
    for name, kind in types.items():
        found += [f"{name}: {fault}" for fault in _faults_of_name(name, kind)]
        if name.startswith("hami_agent_"):
            found += [f"{name}: {fault}" for fault in _faults_of_text(name, helps.get(name, ""))]
        elif not helps.get(name):
            found.append(f"{name}: no help text")
    return found


def _faults_of_name(name: str, kind: str) -> Iterator[str]:
    words = name.split("_")
    if (kind == "counter") != name.endswith("_total"):
        yield "counters end with _total, and nothing else does"
    if kind != "histogram" and name.endswith("_bucket"):
        yield "only histograms end with _bucket"
    if kind not in {"histogram", "summary"} and name.endswith(("_count", "_sum")):
        yield "only histograms and summaries end with _count or _sum"
    if any(one in words for one in TYPES):
        yield "the type is no part of the name"
    if ":" in name or name != name.lower():
        yield "lower case and underscores alone"
    if OTHER_UNITS.search(name) or SHORT_UNITS.intersection(words):
        yield "units are seconds and bytes, in full"


def _faults_of_text(name: str, text: str) -> Iterator[str]:
    if len(text.split()) < FEWEST_WORDS or not text.endswith("."):
        yield f"the help text is no sentence: {text!r}"
    if "Unix time" in text and not name.endswith("_timestamp_seconds"):
        yield "a moment ends with _timestamp_seconds"


def _faults_of_labels(page: str, types: dict[str, str]) -> Iterator[str]:
    for name, labels in SERIES.findall(page):
        for label in LABEL.findall(labels):
            if label != label.lower():
                yield f"{name}: label {label} is not in lower case"
            if label == "le" and types.get(name.removesuffix("_bucket")) != "histogram":
                yield f"{name}: label le belongs to histograms"
            if label == "quantile" and types.get(name) != "summary":
                yield f"{name}: label quantile belongs to summaries"
