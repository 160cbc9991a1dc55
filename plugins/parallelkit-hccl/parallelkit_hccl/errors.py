"""What can go wrong with HCCL; all are `TransportError`s of parallelkit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from parallelkit.errors import StateError, TransportError


class HcclError(TransportError):
    """HCCL or the device's runtime refused a call.

    Attributes:
        function: the C function that failed, `""` where it was none.
        code: what it returned, 0 where it was none.
    """

    def __init__(self, message: str, *, function: str = "", code: int = 0) -> None:
        super().__init__(message)
        self.function = function
        self.code = code

    def within(self, what: str) -> Self:
        """The same error, its message headed by what was being done."""
        return type(self)(f"{what}: {self}", **self._facts())

    def _facts(self) -> dict[str, Any]:
        return {"function": self.function, "code": self.code}


class HcclUnavailableError(HcclError):
    """A library, or a function in it, is missing; `function` names the latter."""


class HcclTimeoutError(HcclError):
    """Something did not end within its deadline.

    Attributes:
        missing: the ranks that were waited for, as far as known; empty where nobody can tell.
    """

    def __init__(
        self, message: str, *, function: str = "", code: int = 0, missing: Sequence[int] = ()
    ) -> None:
        super().__init__(message, function=function, code=code)
        self.missing = tuple(missing)

    def _facts(self) -> dict[str, Any]:
        return {**super()._facts(), "missing": self.missing}


class HcclStateError(HcclError, StateError):
    """A communicator that is closed or broken was used."""


class HcclArgumentError(HcclError):
    """A rank, device, pointer, dtype or size that cannot be; nothing was called."""


class RootInfoError(HcclError):
    """The bytes that name a communicator are not what HCCL makes."""


class PackingError(HcclError):
    """A tensor cannot be sent to this peer the way it was asked for; nothing was sent."""
