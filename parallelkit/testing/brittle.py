"""A model of plain arrays that fails at a chosen place, once."""

from __future__ import annotations

from parallelkit.testing.arrays import Arrays

#: Where it can fail while it is written, in order; `damage` is a byte changed after placing.
SINK_FAULTS = ("check", "begin", "write", "finish", "damage", "read")
#: And as a source.
SOURCE_FAULTS = ("look", "read")


class BrittleArrays(Arrays):
    """`Arrays` that raise `error` at `fault`, and then work again.

    Attributes:
        fault: one of `SINK_FAULTS` or `SOURCE_FAULTS`, or "" for none; cleared as it strikes.
        error: what is raised, not for `damage`.
        after: how many tensors are written or read before it strikes.
    """

    fault = ""
    error: BaseException = OSError("made to fail")
    after = 2

    def strike(self, at: str) -> bool:
        """Whether the fault is here; raises unless it is `damage`."""
        if self.fault != at:
            return False
        self.fault = ""
        if at != "damage":
            raise self.error
        return True

    def check(self) -> None:
        self.strike("check")

    def begin(self) -> None:
        self.strike("begin")
        self.strike("look")

    def destination(self, index: int) -> memoryview | None:
        # One by one while it is to fail in the middle, so that those before are in place.
        return None if self.fault == "write" else super().destination(index)

    def write(self, index: int, data: memoryview) -> None:
        if index >= self.after:
            self.strike("write")
        super().write(index, data)

    def finish(self) -> None:
        self.strike("finish")
        if self.strike("damage"):
            first = next(a for a in self.arrays.values() if a.size)
            first.reshape(-1)[0] += 1

    def host_bytes(self, index: int) -> memoryview:
        if index >= self.after:
            self.strike("read")
        return super().host_bytes(index)
