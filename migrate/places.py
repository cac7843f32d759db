"""Where every node of a tree stands in the text.

Source: libcst 1.9, metadata/span_provider.py. The places are those of ByteSpanPositionProvider: a
tree is put together again, and each node notes where its part begins and ends. Asking the provider
for them costs a visit of the whole tree more, and twice the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import libcst as cst
from libcst.metadata.span_provider import (
    ByteSpanPositionProvider,
    SpanProvidingCodegenState,
    byte_length_in_utf8,
)


class Span(NamedTuple):
    """A range of bytes of the UTF-8 text, `stop` not included."""

    start: int
    stop: int


Spans = dict[cst.CSTNode, Span]


def written(module: cst.Module, text: str) -> tuple[str, Spans]:
    """A tree as text again, and where in it each node stands; `text` is what it was parsed from."""
    state = _Writing(module.default_indent, module.default_newline, ByteSpanPositionProvider())
    state.get_length = len if text.isascii() else byte_length_in_utf8
    module._codegen(state)
    return "".join(state.tokens), state.spans


@dataclass
class _Writing(SpanProvidingCodegenState):
    """The text so far, and the places of the nodes in it."""

    spans: Spans = field(default_factory=dict)

    def before_codegen(self, node: cst.CSTNode) -> None:
        self._stack.append(self.position)

    def after_codegen(self, node: cst.CSTNode) -> None:
        """Notes all of a node, unless it has said which part of it is syntax."""
        self.spans.setdefault(node, Span(self._stack.pop(), self.position))

    def record_syntactic_position(  # type: ignore[override]
        self,
        node: cst.CSTNode,
        *,
        start_node: cst.CSTNode | None = None,
        end_node: cst.CSTNode | None = None,
    ) -> _Syntax:
        return _Syntax(self, node, start_node, end_node)


class _Syntax:
    """Notes what is written in a `with` block, or from one node to another, as the node's place."""

    def __init__(
        self,
        state: _Writing,
        node: cst.CSTNode,
        first: cst.CSTNode | None,
        last: cst.CSTNode | None,
    ) -> None:
        self.state, self.node, self.first, self.last = state, node, first, last

    def __enter__(self) -> None:
        self.start = self.state.position

    def __exit__(self, *_: object) -> None:
        spans = self.state.spans
        start = self.start if self.first is None else spans[self.first].start
        stop = self.state.position if self.last is None else spans[self.last].stop
        spans[self.node] = Span(start, stop)
