"""A module that weights reach through its own loader; a `LoaderSink` and `LocatedSink`.

What the loader does is watched once, on a copy without data where that is possible. From then on
names of which it only copies views go straight from the received bytes into live memory. All others
are given to the loader, by name, in every update.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Container, Mapping, Sequence
from typing import Final, final

import attrs
import torch
from torch import nn

from parallelkit.errors import LoaderError, ManifestError, ManifestMismatchError, StateError
from parallelkit.weights.inventory import KEEP
from parallelkit.weights.manifest import Manifest
from parallelkit.weights.overlap import Span
from parallelkit.weights.subscriber import SERVE_THREAD
from parallelkit_torch import tensors
from parallelkit_torch.names import Slot, refuse_frozen, slots, unwrap
from parallelkit_torch.placement.again import beside, left_out, written
from parallelkit_torch.placement.observe import DTYPES, Notes, observe, observe_on_copy
from parallelkit_torch.placement.proof import Proof, Routes, prove
from parallelkit_torch.placement.record import ValuesNeededError
from parallelkit_torch.placement.replay import Replay, invertible, whole
from parallelkit_torch.placement.twin import Loader

#: So many names or differences are listed in one message.
_SHOWN: Final = 20


@final
class LoadedModule:
    """Places published tensors by recorded copies, and by the loader where those do not suffice.

    The first update runs the loader for everything, on the live module, and compares what the
    copies would have written with what it wrote: a name that differs stays with the loader. Memory
    for the names that go through the loader, in the first update all, is held until it has run.
    """

    def __init__(self, module: nn.Module, loader: Loader) -> None:
        """Look at the module; nothing is called yet.

        Args:
            loader: takes pairs of published name and tensor (row-major, on the CPU, its own to
                keep) and writes them into `module`. May return the names that it loaded.

        Raises:
            ManifestError: a parameter or buffer has no memory that can be written, by name.
        """
        self._module = module
        self._loader = loader
        self._published: Manifest | None = None
        self._proof: Proof | None = None
        self._untried = ""
        self._compared = False
        self._open = False
        self._pending: dict[int, torch.Tensor] = {}
        self._live: tuple[Span, ...] = ()
        for slot in slots(module, transient=True):
            _refuse(slot)
        self._replay = Replay(module)
        self._known = frozenset(_parameters(module))

    @property
    def device(self) -> str:
        """Where the tensors are; of the first one, if they differ."""
        held = slots(self._module)
        return str(held[0].tensor.device) if held else "cpu"

    @property
    def module(self) -> nn.Module:
        """The module as it was given, wrappers included."""
        return self._module

    def learn(self, published: Manifest) -> None:
        """Find out what the loader does with these names; the live module is not touched.

        Raises:
            ManifestMismatchError: a parameter gets no value, or only in part; a published tensor
                goes nowhere; or the loader raised. Everything found is listed.
        """
        self._published, self._proof, self._untried, self._compared = published, None, "", False
        try:
            notes = observe_on_copy(self._module, self._loader, published)
            proof = _accepted(published, notes)
            self._adopt(self._subset_works(published, notes, proof))
        except ValuesNeededError as error:
            self._untried = str(error)
        except LoaderError as error:
            raise _mismatch([str(error)]) from error

    def needs(self) -> Manifest:
        """What `learn` was given: whether it is what the loader needs was settled there."""
        return self._manifest()

    def check(self) -> None:
        """Look at the module again; the thread of `subscriber.serve()` only looks.

        Raises:
            ManifestError: a tensor that is written without the loader has another dtype, shape,
                strides or tie than when the loader was watched; or there is a parameter that was
                not, of which nobody knows whether the loader gives it a value.
        """
        refuse_frozen(self._module)
        new = [name for name in _parameters(self._module) if name not in self._known]
        if new:
            more = f" (and {len(new) - 1} more)" if len(new) > 1 else ""
            raise ManifestError(f"parameter {new[0]!r} is new{more}; {KEEP}")
        self._replay.check(keep=threading.current_thread().name != SERVE_THREAD)

    def begin(self) -> None:
        """Wait for what still reads the old values, and let tensors be written.

        Raises as `check` does.
        """
        self.check()
        tensors.settle(self._tensors())
        self._pending.clear()
        found = self._replay.located()
        if found != self._live:
            self._live = found
        self._open = True

    def live_memory(self) -> Sequence[Span]:
        """Where the tensors lie that routes or the loader write, before and after it ran.

        As long as nobody knows what a loader writes: all of the module's.
        """
        return self._live

    def destination(self, index: int) -> memoryview | None:
        """Return live bytes where tensor `index` is copied as it is, in one run; else None."""
        self._check_open("destination")
        spec = self._manifest().unique[index]
        routes = self._routes(spec.name)
        return None if routes is None else self._replay.direct(spec, routes)

    def write(self, index: int, data: memoryview) -> None:
        """Place tensor `index`; one that is the loader's is copied, and placed by `finish`."""
        self._check_open("write")
        spec = self._manifest().unique[index]
        if data.nbytes != spec.nbytes:
            raise ManifestError(
                f"tensor {spec.name!r} has {spec.nbytes} bytes, {data.nbytes} were given"
            )
        routes = self._routes(spec.name)
        if routes is not None or not spec.nbytes:
            self._replay.write(data, routes or ())
            return
        staged = torch.empty(math.prod(spec.shape), dtype=DTYPES[spec.dtype], device="cpu")
        tensors.as_bytes(staged)[:] = data.cast("B")
        self._pending[index] = staged.reshape(spec.shape)

    def readable(self, index: int) -> bool:
        """Whether `host_bytes` can give tensor `index` back: all of it was kept, and not cast."""
        return self._compared and self._invertible(self._manifest().unique[index].name)

    def host_bytes(self, index: int) -> memoryview:
        """Read tensor `index` back from live memory, row-major.

        Raises:
            StateError: it is not `readable`.
        """
        spec = self._manifest().unique[index]
        routes = self._routes(spec.name)
        if routes is None or not self.readable(index):
            raise StateError(f"tensor {spec.name!r} cannot be read back from the module")
        return self._replay.read(spec, routes)

    def finish(self) -> None:
        """Run the loader for the names that are its, and tell torch of every change.

        Raises:
            LoaderError: it raised, or did not write what it wrote when it was watched.
            ManifestMismatchError: watched for the first time, it left a parameter without values.
        """
        self._check_open("finish")
        self._open = False
        if self._pending:
            try:
                self._load()
            finally:
                self._follow_moved()
            self._known = frozenset(_parameters(self._module))  # a loader may make some
        tensors.mark_written(self._tensors())
        tensors.settle(self._tensors())

    def explain(self) -> str:
        """Say how many names are recorded, and which are the loader's and why."""
        unique = self._manifest().unique
        if self._proof is None:
            return (
                f"{len(unique)} tensors by the loader; what it does will be recorded in the first "
                f"update, since {self._untried}"
            )
        routes, reasons = self._proof.routes, self._proof.reasons
        direct = sum(
            len(routes[s.name]) == 1 and whole(s, routes[s.name][0])
            for s in unique
            if s.name in routes
        )
        how = "in the first update" if self._untried else "on a copy without data"
        lines = [
            f"{len(unique)} tensors: {len(routes)} recorded {how} ({direct} go straight into live "
            f"memory, {len(routes) - direct} by strided or casting copies), {len(reasons)} by the "
            "loader"
        ]
        lines += [f"  by the loader: {n!r} {why}" for n, why in list(reasons.items())[:_SHOWN]]
        if len(reasons) > _SHOWN:
            lines.append(f"  ... and {len(reasons) - _SHOWN} more")
        if not self._compared:
            lines.append("  the first update runs the loader for all of them, and compares")
        unread = [s.name for s in unique if not self._invertible(s.name)]
        if unread:
            more = ", ..." if len(unread) > 3 else ""
            lines.append(
                f"  verified: staged bytes, for {len(unread)} that cannot be read back: "
                f"{', '.join(map(repr, unread[:3]))}{more}"
            )
        return "\n".join(lines)

    def _tensors(self) -> list[torch.Tensor]:
        return [slot.tensor for slot in slots(self._module, transient=True)]

    def _manifest(self) -> Manifest:
        if self._published is None:
            raise StateError("LoadedModule was asked for tensors before learn()")
        return self._published

    def _routes(self, name: str) -> Routes | None:
        """How a tensor is placed without the loader; None where it is not, or not yet."""
        return self._proof.routes.get(name) if self._proof is not None and self._compared else None

    def _invertible(self, name: str) -> bool:
        routes = None if self._proof is None else self._proof.routes.get(name)
        if routes is None or self._proof is None or name in self._proof.partial:
            return False
        return all(map(invertible, routes))

    def _adopt(self, proof: Proof) -> None:
        self._proof = proof
        self._replay.use(proof)

    def _subset_works(self, published: Manifest, notes: Notes, proof: Proof) -> Proof:
        """Check that the loader does the same for its names when it is given no others."""
        reasons = proof.reasons
        if not reasons or not proof.routes:
            return proof
        names = [t.name for t in published.tensors if (t.alias_of or t.name) in reasons]
        try:
            alone = observe_on_copy(self._module, self._loader, published, names)
        except (LoaderError, ValuesNeededError):
            alone = None
        if alone is not None and _same(alone, notes, reasons):
            return proof
        why = "the loader does otherwise when it is not given all names at once"
        return attrs.evolve(
            proof,
            routes={},
            reasons=reasons | dict.fromkeys(proof.routes, why),
            partial=frozenset(),
        )

    def _load(self) -> None:
        manifest = self._manifest()
        given = {spec.name: self._pending.get(i) for i, spec in enumerate(manifest.unique)}
        for spec in manifest.unique:
            if not spec.nbytes and not self._compared:  # has no bytes to come, and is a name
                given[spec.name] = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="cpu")
        named = ((t.name, given[t.alias_of or t.name]) for t in manifest.tensors)
        offered = {name: tensor for name, tensor in named if tensor is not None}
        try:
            notes, recorder = observe(
                self._loader,
                offered,
                slots(self._module, transient=True),
                parts=unwrap(self._module).modules(),
            )
            if self._proof is None:
                self._adopt(_accepted(manifest, notes, written=True))
            self._check_written(notes)
        except LoaderError:
            if self._untried and self._compared and self._proof is not None:
                why = "the loader failed when it was given some names only"
                self._give_to_loader(dict.fromkeys(self._proof.routes, why))
            raise
        moved = {} if self._compared else notes.reasons | self._different()
        del offered, given
        self._pending.clear()
        if not self._compared:
            kept = "is kept by the loader or the module after loading"
            self._give_to_loader(dict.fromkeys(recorder.retained(), kept) | moved)
        self._compared = True

    def _follow_moved(self) -> None:
        """The loader may have given tensors other memory: either place was written then."""
        found = self._replay.located()
        if found != self._live:
            self._live = (*self._live, *found)

    def _check_written(self, notes: Notes) -> None:
        """The loader must write all that it wrote of these names when it was watched first.

        And nothing that the recorded copies write, which are in place before it runs.
        """
        assert self._proof is not None
        lacking = left_out(self._proof.touched, written(notes), sorted(self._given()))
        if lacking:
            raise LoaderError(
                f"the loader wrote {lacking}, which it did when it was watched first; the module "
                "is of no version"
            )
        if self._compared:
            places = [place.name for place in self._proof.places]
            over = beside(notes, self._proof.routes, places)
            if over:
                raise LoaderError(
                    f"the loader wrote into {over!r} too, of which it was given nothing and which "
                    "it did not when it was watched first; the module is of no version"
                )

    def _given(self) -> frozenset[str]:
        unique = self._manifest().unique
        return frozenset(unique[index].name for index in self._pending)

    def _different(self) -> dict[str, str]:
        """Names of which the recorded copies would write otherwise than the loader did."""
        assert self._proof is not None
        self._replay.look()
        found = {}
        for index, spec in enumerate(self._manifest().unique):
            routes = self._proof.routes.get(spec.name)
            if routes and index in self._pending:
                place = self._replay.differing(self._pending[index], routes)
                if place:
                    found[spec.name] = (
                        f"the recorded copies give {place!r} other bytes than the loader"
                    )
        return found

    def _give_to_loader(self, names: Mapping[str, str]) -> None:
        """Let the loader have these names for good, for the reasons given."""
        assert self._proof is not None
        routes = {n: routes for n, routes in self._proof.routes.items() if n not in names}
        if len(routes) < len(self._proof.routes):
            reasons = {**names, **self._proof.reasons}
            self._adopt(attrs.evolve(self._proof, routes=routes, reasons=reasons))

    def _check_open(self, what: str) -> None:
        if not self._open:
            raise StateError(f"LoadedModule.{what} was called outside begin and finish")


def _parameters(module: nn.Module) -> list[str]:
    return [s.name for s in slots(module) if isinstance(s.holder.get(s.key), nn.Parameter)]


def _accepted(published: Manifest, notes: Notes, *, written: bool = False) -> Proof:
    proof = prove(published, notes)
    if proof.problems:
        raise _mismatch(proof.problems, written=written)
    return proof


def _mismatch(lines: Sequence[str], *, written: bool = False) -> ManifestMismatchError:
    more = len(lines) - _SHOWN
    shown = [*lines[:_SHOWN], *([f"... and {more} more"] if more > 0 else [])]
    end = (
        "The loader has written into the module, which is of no version now."
        if written
        else "Nothing was touched."
    )
    return ManifestMismatchError(
        f"the loader does not bring what is published to where it is needed, {len(lines)} "
        "difference(s):\n  " + "\n  ".join(shown) + "\n" + end,
        differences=lines,
    )


def _same(alone: Notes, full: Notes, names: Container[str]) -> bool:
    """Whether a run with some names only did for them what the run with all did."""

    def copies(notes: Notes) -> set[object]:
        return {(c.name, c.source, c.target) for c in notes.copies if c.name in names}

    def writes(notes: Notes, named: bool) -> set[object]:
        return {(w.names, w.target, w.how) for w in notes.writes if bool(w.names) == named}

    return (
        copies(alone) == copies(full)
        and writes(alone, True) == writes(full, True)
        and writes(alone, False) <= writes(full, False)
        and alone.rehomed.items() <= full.rehomed.items()
        and all(alone.ways.get(n) == full.ways.get(n) for n in alone.ways | full.ways if n in names)
    )


def _refuse(slot: Slot) -> None:
    """Raise for a tensor whose memory cannot be written element by element."""
    tensor = slot.tensor
    own = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    problem = f"is a {type(tensor).__qualname__}" if own or tensor.is_nested else ""
    if not problem and tensor.layout is not torch.strided:
        problem = f"has layout {tensor.layout}"
    if not problem and (tensor.is_meta or nn.parameter.is_lazy(tensor)):
        problem = "has no data; materialise the model first"
    if problem:
        raise ManifestError(f"tensor {slot.name!r} {problem}; a loader cannot be watched with it")
