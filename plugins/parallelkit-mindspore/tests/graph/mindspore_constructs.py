"""Functions that MindSpore refuses, each for a reason of its own, and others that it takes.

The comment `break:` says what is to be reported, and in which line.
"""
# ruff: noqa: C416, C420, E731, N805, PERF401, RET503, RET504, RUF015, SIM105

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

LOCK = threading.RLock()
COUNT = 0
FLAG = False


def helper(x: Any) -> Any:
    try:  # break: try statement
        return x + 1
    except ValueError:
        return x


def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


@decorate
def decorated(x: Any) -> Any:
    return x + 2


@ms.jit_class
class Context:
    def __init__(self) -> None:
        self.n = 1

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


CONTEXT = Context()


class Plain:
    def __init__(self) -> None:
        self.n = 2

    def run(self, x: Any) -> Any:
        return helper(x) * self.n


PLAIN = Plain()

# --- refused -----------------------------------------------------------------------------------


def tries(x: Any) -> Any:
    try:  # break: try statement
        y = x + 1
    except ValueError:
        y = x
    return y


def tries_finally(x: Any) -> Any:
    try:  # break: try statement
        y = x + 1
    finally:
        pass
    return y


def tries_star(x: Any) -> Any:
    try:  # break: try statement
        y = x + 1
    except* ValueError:
        y = x
    return y


def tries_in_a_loop(x: Any) -> Any:
    for i in range(2):
        if i > 0:
            try:  # break: try statement
                x = x + 1
            except ValueError:
                pass
    return x


def tries_in_a_dead_branch(x: Any) -> Any:
    if False:
        try:  # break: try statement
            x = x + 1
        except ValueError:
            pass
    return x


def yields(x: Any) -> Any:
    yield x + 1  # break: generator (yield)


def yields_from(x: Any) -> Any:
    yield from [x]  # break: generator (yield from)


def yields_inside(x: Any) -> Any:
    def inner() -> Any:
        yield 1  # break: generator (yield)

    return x


def deletes(x: Any) -> Any:
    y = x + 1
    del y  # break: del statement
    return x


def deletes_an_item(x: Any) -> Any:
    d = {"a": x, "b": x}
    del d["a"]  # break: del statement
    return d["b"]


def deletes_after_raise(x: Any) -> Any:
    if x.shape[0] == 77:
        raise ValueError("no")
        del x  # break: del statement
    return x


def matches(x: Any) -> Any:
    match 1:  # break: match statement
        case 1:
            return x
        case _:
            return x + 1


def walruses(x: Any) -> Any:
    if (n := 3) > 2:  # break: assignment expression (:=)
        return x * n
    return x


def opens(x: Any) -> Any:
    with open("/dev/null"):  # break: with statement
        return x + 1


def locks(x: Any) -> Any:
    with LOCK:  # break: with statement
        return x + 1


def suppresses(x: Any) -> Any:
    with contextlib.suppress(ValueError):  # break: with statement
        return x + 1


def enters_a_function(x: Any) -> Any:
    with contextlib.nullcontext():  # break: with statement
        return x + 1


def nonlocals(x: Any) -> Any:
    n = 1

    def inner() -> Any:
        nonlocal n  # break: nonlocal statement
        n = 2
        return x

    return inner() + n


def defines_a_class(x: Any) -> Any:
    class A:  # break: class definition
        pass

    return x + 1


def imports(x: Any) -> Any:
    import math  # break: import statement

    return x + math.pi


def imports_from(x: Any) -> Any:
    from math import pi  # break: import statement

    return x + pi


def while_else(x: Any) -> Any:
    i = 0
    while i < 2:  # break: while loop with else
        i += 1
    else:
        x = x + 1
    return x


def for_else(x: Any) -> Any:
    for i in range(2):  # break: for loop with else
        x = x + i
    else:
        x = x + 1
    return x


def two_loops_in_a_list(x: Any) -> Any:
    return [x * i * j for i in range(2) for j in range(2)][0]  # break: comprehension with two loops


def two_loops_in_a_dict(x: Any) -> Any:
    d = {(i, j): x for i in (1,) for j in (2,)}  # break: comprehension with two loops
    return d[(1, 2)]


def two_loops_in_a_generator(x: Any) -> Any:
    return sum(x for _ in (1,) for _ in (2,))  # break: comprehension with two loops


def sets(x: Any) -> Any:
    return x + len({1, 2})  # break: set display


def set_comprehension(x: Any) -> Any:
    return x + len({k for k in (1, 2)})  # break: set comprehension


def complex_numbers(x: Any) -> Any:
    return x + (1j).real  # break: complex constant


def prints_without_a_newline(x: Any) -> Any:
    print("a", end="")  # break: call of print()
    return x


def positional_only_inside(x: Any) -> Any:
    def inner(y: Any, /) -> Any:  # break: positional-only argument
        return y * 2

    return inner(x)


def positional_only(x: Any, /) -> Any:  # break: positional-only argument
    return x + 1


async def waits(x: Any) -> Any:  # break: coroutine (async)
    return x


def calls(x: Any) -> Any:
    return helper(x) * 2


def calls_a_method(x: Any) -> Any:
    return PLAIN.run(x)


def calls_by_default(x: Any, function: Callable[..., Any] = helper) -> Any:
    return function(x)


def calls_higher(function: Callable[..., Any], x: Any) -> Any:
    return function(x)


def several(x: Any) -> Any:
    import math

    y = x + math.pi
    del y
    return len({1, 2}) + helper(x)


# --- taken -------------------------------------------------------------------------------------


def fine(x: Any) -> Any:
    return ops.relu(x) * 2


def lambdas(x: Any) -> Any:
    return (lambda y: y + 1)(x)


def named_lambdas(x: Any) -> Any:
    f = lambda y, k=2: y + k
    return f(x)


def writes_a_global(x: Any) -> Any:
    global COUNT
    COUNT = COUNT + 1
    return x + 1


def functions_inside(x: Any) -> Any:
    def inner(y: Any, *, k: int = 2) -> Any:
        return y * k

    return inner(x, k=3)


def raises_perhaps(x: Any) -> Any:
    if x.shape[0] == 77:
        raise ValueError("no") from KeyError("why")
    return x


def asserts(x: Any) -> Any:
    assert x.shape[0] == 3, "shape"
    return x


def prints(x: Any) -> Any:
    print(x.shape)
    return x


def formats(x: Any) -> Any:
    s = f"{3.14159:.2f}"
    return x + len(s)


def branches_on_data(x: Any) -> Any:
    if x.sum() > 0:
        return x * 2
    return x


def loops_on_data(x: Any) -> Any:
    while x.sum() < 100:
        x = x * 2
    return x


def breaks_and_continues(x: Any) -> Any:
    for i in range(4):
        if i == 1:
            continue
        if i == 3:
            break
        x = x + i
    return x


def comprehensions(x: Any) -> Any:
    return sum([x * i for i in range(3) if i > 1])


def nested_comprehensions(x: Any) -> Any:
    return [[x for _ in (1,)] for _ in (1,)][0][0]


def dict_comprehensions(x: Any) -> Any:
    return {k: x for k in ("a", "b")}["a"]


def generator_expressions(x: Any) -> Any:
    return sum(x * i for i in range(3))


def unpacks(x: Any) -> Any:
    a, *b = [x, x, x]
    return a + b[0]


def passes_on_arguments(x: Any) -> Any:
    return ops.add(*(x, x))


def items(x: Any) -> Any:
    return x * x.sum().item()


def goes_to_numpy(x: Any) -> Any:
    return Tensor(x.asnumpy() + 1)


def numpy_inside(x: Any) -> Any:
    return Tensor(np.sort(np.array([3.0, 1.0, 2.0], np.float32))) + x


def conditional_expressions(x: Any) -> Any:
    return x if 1 < x.shape[0] < 5 else x + 1


def annotates(x: Any) -> Any:
    y: int = 3
    return x * y


def isinstances(x: Any) -> Any:
    return x + 1 if isinstance(x, Tensor) else x


def gives_nothing(x: Any) -> Any:
    return None


def gives_a_dict(x: Any) -> Any:
    return x, {"a": x}


def appends(x: Any) -> Any:
    out = []
    for i in range(3):
        out.append(x * i)
    return ops.stack(out)


def deletes_after_return(x: Any) -> Any:
    return x
    del x


def deletes_after_break(x: Any) -> Any:
    for i in range(3):
        break
        del i
    return x


def deletes_after_continue(x: Any) -> Any:
    for i in range(3):
        continue
        del i
    return x


def enters_a_jit_class(x: Any) -> Any:
    with CONTEXT:
        x = x + 1
    return x


def makes_a_jit_class(x: Any) -> Any:
    with Context() as c:
        return x + c.n


def calls_what_fails_if_not_reached(x: Any) -> Any:
    if FLAG:
        return helper(x)
    if x.shape[0] == 77:
        return helper(x)
    return x


def calls_a_decorated(x: Any) -> Any:
    return decorated(x)


# --- cells -------------------------------------------------------------------------------------


class Bad(nn.Cell):
    def construct(self, x: Any) -> Any:
        return x * len({1, 2})  # break: set display


class Outer(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Bad()

    def construct(self, x: Any) -> Any:
        return self.inner(x)


class Listed(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.CellList([nn.Dense(3, 3), Bad()])

    def construct(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class Helping(nn.Cell):
    def helped(self, x: Any) -> Any:
        return helper(x)

    def construct(self, x: Any) -> Any:
        return self.helped(x)


class FromBase(Helping):
    def construct(self, x: Any) -> Any:
        return super().helped(x)


class InADict(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {"bad": Bad()}

    def construct(self, x: Any) -> Any:
        return self.kept["bad"](x)


class NoSelf(nn.Cell):
    def construct(this, x: Any) -> Any:  # break: method whose first argument is not self
        return x + 1


class MethodNoSelf(nn.Cell):
    def helped(this, x: Any) -> Any:  # break: method whose first argument is not self
        return x * 2

    def construct(self, x: Any) -> Any:
        return self.helped(x)


class ClassMethod(nn.Cell):
    @classmethod  # break: method whose first argument is not self
    def helped(cls, x: Any) -> Any:
        return x * 3

    def construct(self, x: Any) -> Any:
        return self.helped(x)


class BadProperty(nn.Cell):
    @property
    def k(self) -> Any:
        try:  # break: try statement
            return 2
        except ValueError:
            return 3

    def construct(self, x: Any) -> Any:
        return x * self.k


class Fine(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Dense(3, 3)
        self.unused: Any = None

    @staticmethod
    def twice(x: Any) -> Any:
        return x * 2

    @property
    def k(self) -> int:
        return 2

    def construct(self, x: Any, *, scale: float = 1.0) -> Any:
        if self.unused is not None:
            x = helper(x)
        return self.twice(self.layer(x)) * self.k * scale
