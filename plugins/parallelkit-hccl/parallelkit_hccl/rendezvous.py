"""How the root info gets from rank 0 to the others: an encrypted channel, msgpack, no pickle.

Rank 0 opens a `RootInfoServer` and hands its ticket to the others over a private channel. Nobody
gets the root info before all have asked for it, so a rank that does not come is known by number,
on every rank, before anyone is in a call of HCCL that cannot be left.
"""

from __future__ import annotations

import time
from typing import Annotated, Final, TypeVar

import msgspec
import zmq

from parallelkit.errors import ProtocolError, TicketError, TransportError
from parallelkit.weights.endpoint import MAX_TIMEOUT_SECONDS, parse_endpoint
from parallelkit.weights.ticket import Ticket, TicketOffice
from parallelkit_hccl.communicator import check_root_info
from parallelkit_hccl.errors import HcclArgumentError, HcclTimeoutError, RootInfoError

#: Bytes of a frame: a request is small, an answer holds a root info or a sentence.
_MAX_REQUEST: Final = 512
_MAX_ANSWER: Final = 16_384
#: Part of a rank's time after which it is told who is missing, so that it hears of it.
_PATIENCE: Final = 0.8
#: Seconds for answers to leave when a server closes.
_LINGER_SECONDS: Final = 2.0

_Rank = Annotated[int, msgspec.Meta(ge=0, le=65536)]
_Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


M = TypeVar("M", bound=msgspec.Struct)


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="root-info"):
    """A rank asks: I am this one, of so many, and can wait for so many seconds."""

    token: _Key
    rank: _Rank
    world_size: _Rank
    seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_TIMEOUT_SECONDS)]


class _Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="answer"):
    """The root info, or why there is none and who is missing."""

    root_info: bytes | None = None
    reason: str = ""
    missing: list[_Rank] = []


class RootInfoServer:
    """Rank 0's end; an `Exchange` for its `HcclCommunicator`. A context manager.

    Attributes:
        ticket: what the other ranks need; a secret, for each rank to use once.
    """

    def __init__(
        self, world_size: int, *, endpoint: str | None = None, expires: float | None = 300.0
    ) -> None:
        """Listen.

        Args:
            world_size: ranks of the communicator, this one included.
            endpoint: `address:port` of one interface; None is loopback and a free port.
            expires: seconds that the ticket can be used.

        Raises:
            HcclArgumentError: fewer than 2 ranks.
            TransportError: the address is not allowed, does not exist here, or is taken.
            TicketError: `expires` is no number above 0.
        """
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 2:
            raise HcclArgumentError(f"world_size is {world_size!r}; it is an integer of at least 2")
        host, port = parse_endpoint(endpoint)
        public, secret = zmq.curve_keypair()
        self._world_size = world_size
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.curve_server = True
        self._router.curve_secretkey = secret
        self._router.setsockopt(zmq.IPV6, int(host.startswith("[")))
        self._router.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST)
        try:
            self._router.bind(f"tcp://{host}:{port or '*'}")
            where = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
            self._office = TicketOffice(where, public.decode())
            self.ticket, _ = self._office.issue(world_size - 1, expires, "hccl")
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(
                f"cannot listen at {host}:{port or 'any free port'}: {error}; give "
                "RootInfoServer(endpoint='address:port') an address of this host and a free port"
            ) from error
        except TicketError:
            self.close()
            raise

    def __call__(self, root_info: bytes | None, seconds: float) -> bytes:
        """Give every rank the root info. Blocks until all asked, or `seconds` have passed.

        A rank that can wait less makes it less for all: without it nothing can come of this.

        Raises:
            HcclTimeoutError: some ranks did not come; `missing` names them. Those that did are
                told.
            RootInfoError: there is no root info of HCCL's size to give.
        """
        if root_info is None:
            raise RootInfoError("RootInfoServer is for rank 0, which has the root info")
        check_root_info(root_info)
        routes: dict[int, bytes] = {}
        began = time.monotonic()
        deadline = began + seconds
        while len(routes) < self._world_size - 1 and (left := deadline - time.monotonic()) > 0:
            if self._router.poll(int(1000 * left) + 1) and (patience := self._receive(routes)):
                deadline = min(deadline, time.monotonic() + patience)
        missing = [rank for rank in range(1, self._world_size) if rank not in routes]
        waited = time.monotonic() - began
        reason = f"of {self._world_size} ranks, {missing} did not come within {waited:.3g} s"
        if missing:
            self._answer(routes, _Answer(reason=reason, missing=missing))
            raise HcclTimeoutError(f"the rendezvous of HCCL failed: {reason}", missing=missing)
        self._answer(routes, _Answer(root_info=root_info))
        return root_info

    def close(self) -> None:
        """Stop listening; answers that were given still leave. Harmless when repeated."""
        if not self._context.closed:
            self._router.close(int(1000 * _LINGER_SECONDS))
            self._context.term()

    def __enter__(self) -> RootInfoServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _receive(self, routes: dict[int, bytes]) -> float | None:
        """Take one request; whatever is wrong with it is told to its sender alone.

        Returns:
            For how long its sender can be let wait, if it may join.
        """
        frames = self._router.recv_multipart()
        try:
            if len(frames) != 2:
                raise ProtocolError(f"a request of {len(frames) - 1} frames instead of 1")
            asked = _decode(frames[1], _Request)
            if asked.world_size != self._world_size:
                raise ProtocolError(
                    f"rank {asked.rank} was told of {asked.world_size} ranks; rank 0 of "
                    f"{self._world_size}"
                )
            self._office.redeem(asked.token, asked.rank - 1)
        except (ProtocolError, TicketError) as error:
            self._answer({-1: frames[0]}, _Answer(reason=f"rank 0 refused: {error}"))
            return None
        routes[asked.rank] = frames[0]
        return float(asked.seconds) * _PATIENCE

    def _answer(self, routes: dict[int, bytes], answer: _Answer) -> None:
        for route in routes.values():
            self._router.send_multipart([route, msgspec.msgpack.encode(answer)])


class RootInfoTicket:
    """Another rank's end; an `Exchange` for its `HcclCommunicator`, for one use."""

    def __init__(self, ticket: str, rank: int, world_size: int) -> None:
        """Read the ticket; nothing is asked yet.

        Args:
            ticket: from rank 0's `RootInfoServer`.
            rank, world_size: as the communicator gets them.

        Raises:
            TicketError: it is no ticket, or was altered or cut.
            HcclArgumentError: the rank is not one that a ticket is for.
        """
        self._ticket = Ticket.decode(ticket)
        if not 1 <= rank < world_size:
            raise HcclArgumentError(
                f"rank is {rank!r} of {world_size!r}; a ticket is for ranks from 1, rank 0 serves"
            )
        self._rank, self._world_size = rank, world_size

    def __call__(self, root_info: bytes | None, seconds: float) -> bytes:
        """Ask rank 0, and wait until all ranks have asked.

        Raises:
            HcclTimeoutError: rank 0 did not answer within `seconds`, or says who is missing.
            TransportError: rank 0 refused, with its reason.
            TicketError: the ticket's address or key cannot be used.
            ProtocolError, RootInfoError: the answer is none.
        """
        data = self._ask(seconds)
        answer = _decode(data, _Answer)
        if answer.missing:
            raise HcclTimeoutError(
                f"the rendezvous of HCCL failed: {answer.reason}", missing=answer.missing
            )
        if answer.root_info is None:
            raise TransportError(f"the rendezvous of HCCL failed: {answer.reason}")
        check_root_info(answer.root_info)
        return answer.root_info

    def _ask(self, seconds: float) -> bytes:
        ticket = self._ticket
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.MAXMSGSIZE, _MAX_ANSWER)
            dealer.setsockopt(zmq.IPV6, int("[" in ticket.endpoint))
            dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
            try:
                dealer.curve_serverkey = ticket.server_key.encode()
                dealer.connect(ticket.endpoint)
            except (zmq.ZMQError, UnicodeEncodeError) as error:
                raise TicketError(
                    f"the ticket names {ticket.endpoint!r} with an unusable address or key: {error}"
                ) from error
            request = _Request(ticket.token, self._rank, self._world_size, seconds)
            dealer.send(msgspec.msgpack.encode(request))
            if not dealer.poll(int(1000 * seconds) + 1):
                raise HcclTimeoutError(
                    f"rank 0 at {ticket.endpoint} did not answer within {seconds:.3g} s: it is "
                    "gone, does not serve yet, or still waits for other ranks",
                    missing=(0,),
                )
            answer: bytes = dealer.recv()
            return answer


def _decode(data: bytes, kind: type[M]) -> M:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a message of the rendezvous is malformed: {error}") from error
