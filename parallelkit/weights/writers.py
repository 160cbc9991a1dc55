"""Which of several subscribers of one target in this process has written it last.

Each of them knows the version that it wrote itself. Once another one has written, that is not what
the target holds, and nothing else would show it.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar


class Writer:
    """One subscriber, as a writer of its target.

    Attributes:
        name: for messages.
        displaced: what is wrong since another one wrote the same target; empty while nothing is.
    """

    _last: ClassVar[weakref.WeakValueDictionary[int, Writer]] = weakref.WeakValueDictionary()

    def __init__(self, name: str) -> None:
        self.name = name
        self.displaced = ""

    def writes(self, target: Any) -> None:
        """It begins to write a target, which it keeps alive, so that no other has its number."""
        before = self._last.get(id(target))
        if before is not None and before is not self:
            before.displaced = (
                f"{self.name}, another subscriber of this process, has written its target since; "
                "close one of the two"
            )
        self._last[id(target)] = self
        self.displaced = ""
