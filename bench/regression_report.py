"""What a check found, for a terminal, for a CI system (JUnit XML), for a pull request (Markdown) and as JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .baseline import WrongUse
from .regression import Case, Kind, Report
from .terminal import counted

WORDS = {Kind.FAILURE: "FAILED", Kind.IMPROVEMENT: "better", Kind.NOTE: "note"}


def to_text(report: Report) -> Iterator[str]:
    """Lines for a terminal: what is to be known of the run, every finding, and a summary."""
    yield from report.notes
    for kind in reversed(Kind):  # the failures last, where one looks first
        for case, finding in report.of_kind(kind):
            yield f"{WORDS[kind]}: {_name(case)}: {finding.message}"
    yield _summary(report)
    numbers = [case.number for case, _ in report.of_kind(Kind.FAILURE) if case.number is not None]
    yield f"to see a decision: {_explanation(report, min(numbers, default=1))}"


def to_json(report: Report) -> dict[str, Any]:
    """Plain data."""
    return {
        "failed": report.failed,
        "baseline": str(report.baseline),
        "log": str(report.log_file),
        "target": report.now.decisions.target,
        "times": report.now.decisions.times,
        "versions": report.now.decisions.versions,
        "notes": report.notes,
        "cases": [
            {
                "graph": case.graph,
                "gemm": case.gemm or None,
                "decision": case.number,
                "findings": [{"kind": finding.kind.value, "message": finding.message} for finding in case.findings],
            }
            for case in report.cases
        ],
    }


def to_junit(report: Report) -> str:
    """JUnit XML: a test case for each graph and for each GEMM."""
    failed = sum(case.worst is Kind.FAILURE for case in report.cases)
    counts = {"tests": str(len(report.cases)), "failures": str(failed), "errors": "0", "skipped": "0"}
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(root, "testsuite", {"name": "nvgemm-fusion regress", **counts})
    for case in report.cases:
        element = ElementTree.SubElement(suite, "testcase", classname=case.graph, name=case.gemm or "graph")
        failures = [finding.message for finding in case.findings if finding.kind is Kind.FAILURE]
        others = [f"{WORDS[f.kind]}: {f.message}" for f in case.findings if f.kind is not Kind.FAILURE]
        if failures:
            failure = ElementTree.SubElement(element, "failure", message="; ".join(failures), type="regression")
            failure.text = "\n".join(failures)
            if case.number is not None:
                failure.text += f"\n{_explanation(report, case.number)}"
        if others:
            ElementTree.SubElement(element, "system-out").text = "\n".join(others)
    ElementTree.SubElement(suite, "system-out").text = "\n".join([*report.notes, _summary(report)])
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def to_markdown(report: Report) -> str:
    """A summary with a table for a pull request: one row a graph or GEMM."""
    rows = ["| | graph | GEMM | fused | time over best unfused | what changed |", f"|{' --- |' * 6}"]
    for case in report.cases:
        if case.gemm or case.findings:
            cells = (
                WORDS[case.worst] if case.worst else "same",
                case.graph,
                case.gemm,
                _change(case, lambda decision: "yes" if decision.fused else "no"),
                _change(case, lambda decision: f"{decision.ratio.value:.3f}" if decision.ratio else ""),
                "; ".join(finding.message for finding in case.findings),
            )
            rows.append(f"| {' | '.join(map(_escaped, cells))} |")
    title = f"### nvgemm-fusion regress: {'failed' if report.failed else 'passed'}"
    return "\n\n".join([title, _summary(report), *map(_escaped, report.notes), "\n".join(rows)]) + "\n"


def write(path: Path, content: str) -> None:
    """Writes a report. Raises WrongUse when that cannot be done."""
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise WrongUse(f"cannot write {path}: {error.strerror}") from error


def _name(case: Case) -> str:
    return f"{case.graph}, {case.gemm}" if case.gemm else case.graph


def _summary(report: Report) -> str:
    graphs, whole = report.now.decisions.graphs, len(report.now.compared)
    decisions = [decision for gemms in graphs.values() for decision in gemms]
    fused = sum(decision.fused for decision in decisions)
    failures, improvements = (len(report.of_kind(kind)) for kind in (Kind.FAILURE, Kind.IMPROVEMENT))
    return (
        f"{counted(len(graphs), 'graph')}, {counted(len(decisions), 'GEMM')} ({fused} fused): "
        f"{counted(failures, 'failure')}, {counted(improvements, 'improvement')}; results of {counted(whole, 'graph')} "
        "compared with float64 as a whole, of the others by their epilogues"
    )


def _explanation(report: Report, number: int) -> str:
    return f"nvgemm-fusion log explain {report.log_file} {number}"


def _change(case: Case, describe: Callable[[Any], str]) -> str:
    before, now = ("" if decision is None else describe(decision) for decision in (case.before, case.now))
    return now if before == now else f"{before or '-'} → {now or '-'}"


def _escaped(text: str) -> str:
    """As it stands, also where it has characters that mean something in Markdown."""
    return re.sub(r"([\\`*_\[\]<>|~#])", r"\\\1", text)
