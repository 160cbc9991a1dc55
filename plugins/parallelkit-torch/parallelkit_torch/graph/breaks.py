"""Dynamo's reasons in plain words: what stands there, in which line, and what to do."""

from __future__ import annotations

import ast
import linecache
import re
import sysconfig
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from parallelkit.graphs import GraphBreak
from parallelkit_torch import names

#: Frames of these folders are nobody's to change; the user's line is the one above them.
_LIBRARIES: Final = (
    names.torch_folder(),
    str(Path(__file__).parents[1]),
    sysconfig.get_path("stdlib"),
)
#: But packages that the user installed live below the standard library's folder.
_INSTALLED: Final = ("site-packages", "dist-packages")

#: Blocks that dynamo cannot leave and enter again in the middle.
_BLOCKS: Final[dict[type[Any], str]] = {
    ast.Try: "try",
    ast.With: "with",
    ast.For: "for",
    ast.While: "while",
}
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

_NO_HELP: Final = r"(?:report|file) an issue|is fundamental|likely to be a Dynamo bug"
_LINES: Final = re.DOTALL | re.MULTILINE

_Frames = Sequence[traceback.FrameSummary]
_Words = str | Callable[[re.Match[str]], str]

#: Dynamo's headline, or its debug context, to words. The first that matches counts.
_CONSTRUCTS: Final[tuple[tuple[str, _Words], ...]] = (
    (r"^Failed to trace builtin operator\b.*?builtin operator `(\w+)`", r"call of \1()"),
    (r"^(generic_jump |Data-dependent branching)", "branch on a tensor's value"),
    (r"^Data-dependent assertion|assert.*tensor", "assertion on a tensor's value"),
    (r"^Unsupported Tensor\.(\w+)\(\)", r"Tensor.\1()"),
    (r"^Tensor\.(\w+)\(\)", r"Tensor.\1()"),
    (r"^Encountered tensor\.(\w+)\(\)", r"Tensor.\1()"),
    (r"^Attempt to trace generator", "generator (yield)"),
    (r"^Attempt to trace a? ?coroutine|\basync\b", "coroutine (async)"),
    (r"^Unsupported context manager\b.*?enter a `([^`]+)`", r"with statement on a \1"),
    (r"^Graph break under GenericContextWrappingVariable", "break inside a with statement"),
    (r"^Skip calling `torch\.compiler\.disable\(\)`d", "call of a function kept from compiling"),
    (r"^Call to `torch\._dynamo\.graph_break\(\)`", "torch._dynamo.graph_break()"),
    (r"^logging\.Logger method", "call of a logger"),
    (r"^Dynamic shape operator\b.*?Operator `([\w.]+)`", r"\1, whose shape depends on the data"),
    (r"^Dynamic slicing|^Data dependent operator\b", "operation that depends on the data"),
    (r"module: (.+?), qualname: (\S+), skip reason", lambda m: f"call of {_qualified(m)}()"),
    (r"^Unsupported (?:function|method) call\b.*?`([^`]+)`", r"call of \1()"),
    (r"^Dynamo recompile limit exceeded", "too many recompilations"),
    (r"^Backend compiler exception", "code that the backend cannot compile"),
)


def from_reason(reason: Any, code: types.CodeType) -> GraphBreak:
    """Explain a break after which dynamo went on, from its `GraphCompileReason`."""
    return _make(str(reason.reason), list(reason.user_stack), code)


def from_exception(error: BaseException, code: types.CodeType) -> GraphBreak:
    """Explain why dynamo left the whole frame of `code` to Python."""
    frames = list(getattr(error, "real_stack", None) or [])
    text = str(getattr(error, "msg", "") or error) or type(error).__name__
    found = _make(text, frames, code)
    around = _around(frames, code)
    return _reworded(found, f"{found.construct} {around}") if around else found


def is_nothing_of_the_users(error: BaseException, code: types.CodeType) -> bool:
    """Whether `error` is no break: the code itself raises, or a library's generator runs."""
    kind = getattr(error, "gb_type", "")
    if kind == "Observed exception":
        return True
    return kind == "Attempt to trace generator" and _is_library(code.co_filename)


def _make(text: str, frames: _Frames, code: types.CodeType) -> GraphBreak:
    file, line = _place(frames, code)
    if any("torch/distributed/fsdp/" in frame.filename for frame in frames):
        return GraphBreak(
            construct="module that FSDP2 shards",
            reason="its parameters are gathered by a hook, which is kept out of graphs",
            file=file,
            line=line,
            hint="compile the units one by one: regions='auto', 'blocks' or their names",
            source=linecache.getline(file, line).strip(),
        )
    return GraphBreak(
        construct=construct(text, linecache.getline(file, line)),
        reason=_explanation(text),
        file=file,
        line=line,
        hint=_hint(text),
        source=linecache.getline(file, line).strip(),
    )


def _reworded(found: GraphBreak, words: str) -> GraphBreak:
    return GraphBreak(
        construct=words,
        reason=found.reason,
        file=found.file,
        line=found.line,
        hint=found.hint,
        source=found.source,
    )


def construct(text: str, source: str = "") -> str:
    """Name what dynamo's reason `text` is about; `source` is the line it is about.

    Example:
        >>> construct("generic_jump TensorVariable()", "while x.sum() > 0:")
        "while loop on a tensor's value"
    """
    for pattern, words in _CONSTRUCTS:
        match = re.search(pattern, text, re.DOTALL)
        if match:
            named = words(match) if callable(words) else match.expand(words)
            if named.startswith("branch") and source.lstrip().startswith("while"):
                return "while loop on a tensor's value"
            return named
    headline = text.split("\n", 1)[0].strip().rstrip(".:")
    return headline[:1].lower() + headline[1:]


def _qualified(match: re.Match[str]) -> str:
    """Module and name as the user writes them: `warnings.warn`, which lives in `_warnings`."""
    module, name = match[1].lstrip("_"), match[2]
    return name if module.startswith(("<", "torch")) else f"{module}.{name}"


def _place(frames: _Frames, code: types.CodeType) -> tuple[str, int]:
    """Innermost line of the user's own code; the frame's own where dynamo gives none."""
    for frame in reversed(frames):
        if not _is_library(frame.filename):
            return frame.filename, frame.lineno or 0
    if frames and _is_library(code.co_filename):
        return frames[-1].filename, frames[-1].lineno or 0
    return code.co_filename, code.co_firstlineno


def _is_library(file: str) -> bool:
    if file.startswith("<"):
        return True
    if file.startswith(_LIBRARIES[:2]):
        return True
    return file.startswith(_LIBRARIES[2]) and not any(part in file for part in _INSTALLED)


def _explanation(text: str) -> str:
    """Dynamo's explanation on one line; its headline where there is none."""
    match = re.search(
        r"^\s*Explanation: (.*?)(?=\n\s*(?:Hint:|Developer debug))", text, re.DOTALL | re.MULTILINE
    )
    if match is None and text.startswith("generic_jump"):
        return "which way to go depends on the value of a tensor, unknown while tracing"
    body = match[1] if match else text.split("\n", 1)[0]
    return " ".join(body.split())


def _hint(text: str) -> str:
    """The first hint that helps the user; telling torch's developers does not."""
    if text.startswith(("generic_jump", "Data-dependent branching")):
        return "write it without a branch, such as with torch.where, or use torch.cond"
    found = re.findall(r"^\s*Hint: (.*?)(?=\n\s*(?:Hint:|Developer debug)|\Z)", text, _LINES)
    hints = [" ".join(hint.split()) for hint in found]
    return next((hint for hint in hints if not re.search(_NO_HELP, hint)), "")


def _around(frames: _Frames, code: types.CodeType) -> str:
    """What keeps dynamo from going on after a break in this frame: an enclosing block.

    A break ends a graph, and tracing goes on after it, except inside `try`, `with` and loops:
    there the rest of the function is run by Python.
    """
    if not frames or frames[0].filename != code.co_filename:
        return ""
    line = frames[0].lineno or 0
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError):
        return ""
    start, words = 0, ""
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt | ast.Lambda) or node.lineno < start:
            continue
        if type(node) not in _BLOCKS and not isinstance(node, _FUNCTIONS):
            continue
        last = node.end_lineno or 0
        # a with statement that cannot be entered is the construct itself, not what is around it
        first = node.lineno + (isinstance(node, ast.With) and len(frames) == 1)
        if first <= line <= last:
            start, words = node.lineno, _BLOCKS.get(type(node), "")
    return f"inside a {words} block" if words else ""
