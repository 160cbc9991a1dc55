"""What MindSpore says when it cannot compile: its reason, its place, and what that means."""

from __future__ import annotations

import ast
import linecache
import re
from typing import Any, Final

import attrs

from parallelkit.graphs import GraphBreak
from parallelkit_mindspore.graph import syntax
from parallelkit_mindspore.graph.walk import Finding

_PLACE: Final = re.compile(
    r"In file (?P<file>\S.*?):(?P<line>\d+)(?:~(?P<last>\d+))?(?:, (?P<start>\d+)~\d+)?\s*$",
    re.MULTILINE,
)
#: The first line of MindSpore's message, to rows of `syntax`.
_KINDS: Final[tuple[tuple[str, str], ...]] = (
    (r"^Unsupported (?:statement|expression) '(\w+)'", r"\1"),
    (r"^The 'while\.\.\.else\.\.\.'", "WhileElse"),
    (r"^The 'for\.\.\.else\.\.\.'", "ForElse"),
    (r"^The 'generators' supports 1", "Comprehension"),
    (r"^Unsupported Constant type : .*j", "Complex"),
    (r"^Only support jit_class instance", "With"),
    (r"^issubclass\(\) arg 1 must be a class", "With"),
    (r"^The parameters number of the function is", "FirstArgument"),
    (r"^Function \w+ needs \d+ positional argument", "PositionalOnly"),
    (r"^The name '\w+' is not defined, or not supported", "PositionalOnly"),
    (r"^Mindspore can not compile temporary source", "Source"),
    (r"^unsupported operand type\(s\) for \+: 'NoneType' and 'str'", "Source"),
    (r"^Parse Lambda Function Fail", "Lambda"),
    (r"^An error occurred while parsing the positional information of the lambda", "Lambda"),
)


@attrs.frozen(kw_only=True)
class Verdict:
    """MindSpore's error, read.

    Attributes:
        reason: its first line. kind: the row of `syntax` that it is about, or empty.
        file, line, last: the innermost place that it names; empty and 0 where it names none.
        start: the column there, or None.
    """

    reason: str
    kind: str
    file: str = ""
    line: int = 0
    last: int = 0
    start: int | None = None


def read(error: BaseException) -> Verdict:
    """Read an exception that MindSpore raised while compiling."""
    text = str(error).strip() or type(error).__name__
    reason = text.splitlines()[0].strip()
    places = list(_PLACE.finditer(text))
    if not places:
        return Verdict(reason=reason, kind=_kind(text))
    found = places[-1]
    line = int(found["line"])
    return Verdict(
        reason=reason,
        kind=_kind(text),
        file=found["file"],
        line=line,
        last=int(found["last"] or line),
        start=int(found["start"]) if found["start"] else None,
    )


def breaks(verdict: Verdict, findings: list[Finding], where: tuple[str, int]) -> list[GraphBreak]:
    """Put MindSpore's verdict and what was found in the code together, in parse order.

    Args:
        where: file and line of the function, for a verdict without a place.
    """
    meant = _meant(verdict, findings)
    shown = [finding for finding in findings if finding.certain or finding is meant]
    made = [_from_finding(finding, verdict, finding is meant) for finding in shown]
    if meant is None:
        made.insert(0, _from_verdict(verdict, where))
    return made


def _kind(text: str) -> str:
    for pattern, row in _KINDS:
        match = re.search(pattern, text)
        if match:
            kind = match.expand(row)
            return kind if syntax.known(kind) else ""
    return ""


def _meant(verdict: Verdict, findings: list[Finding]) -> Finding | None:
    """The finding that MindSpore stopped at.

    Of an error in a function that is called, MindSpore names the place of the call only. It stops
    at the first that it comes to, so the first of this kind is meant.
    """
    kinds = [verdict.kind, "AsyncFunctionDef"] if verdict.kind == "Lambda" else [verdict.kind]
    alike = [finding for finding in findings if finding.kind in kinds]
    if not verdict.kind:  # what it says of code without source has no one form
        alike = [finding for finding in findings if finding.kind == "Source"]
    for finding in alike:
        inside = finding.line <= verdict.line <= max(finding.last, verdict.last)
        if finding.file == verdict.file and inside:
            return finding
    return alike[0] if alike else None


def _from_finding(finding: Finding, verdict: Verdict, is_meant: bool) -> GraphBreak:
    reason = (
        f"MindSpore: {verdict.reason}"
        if is_meant
        else "MindSpore's parser has nothing for it; it stopped before, at another construct"
    )
    return GraphBreak(
        construct=syntax.words(finding.kind),
        reason=reason,
        file=finding.file,
        line=finding.line,
        hint=syntax.hint(finding.kind),
        source=finding.source,
    )


def _from_verdict(verdict: Verdict, where: tuple[str, int]) -> GraphBreak:
    file, line = (verdict.file, verdict.line) if verdict.file else where
    certain = verdict.kind in ("Source", "Lambda", "With")
    construct = syntax.words(verdict.kind) if certain else _at(file, line, verdict.start)
    return GraphBreak(
        construct=construct,
        reason=f"MindSpore: {verdict.reason}",
        file=file,
        line=line,
        hint=syntax.hint(verdict.kind) if certain else "",
        source=linecache.getline(file, line).strip(),
    )


def _at(file: str, line: int, column: int | None) -> str:
    """Name what stands in a file at a line, and a column, which MindSpore counts from 0."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return "code that MindSpore cannot compile"
    nodes: list[Any] = [n for n in ast.walk(tree) if getattr(n, "lineno", None) == line]
    at = [node for node in nodes if column is None or node.col_offset == column]
    for node in at or nodes:  # outer ones first
        if isinstance(node, ast.Expr):
            continue
        if isinstance(node, ast.Call):
            return f"call of {ast.unparse(node.func)}()"
        if isinstance(node, ast.If | ast.While | ast.For | ast.With):
            return f"{type(node).__name__.lower()} statement"
        if isinstance(node, ast.Attribute):
            return f"attribute {ast.unparse(node)}"
    return "code that MindSpore cannot compile"
