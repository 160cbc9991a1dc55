"""Every error parallelkit raises: one class a mistake, all under `ParallelKitError`.

A message says what failed, the value received, and what is allowed or the next command. Errors
that concern peers carry them as attributes, so a supervisor need not parse text.
"""

from __future__ import annotations

from collections.abc import Sequence


class ParallelKitError(Exception):
    """Base of every error that parallelkit raises on purpose."""


class OutputError(ParallelKitError):
    """A file that was asked for cannot be written."""


class PluginWarning(UserWarning):
    """A plugin is left out, or one of its hooks raised; the others go on."""


# --- plugins -----------------------------------------------------------------------------------


class PluginError(ParallelKitError):
    """Something about a plugin, not about its framework, is wrong."""


class PluginLoadError(PluginError):
    """A plugin that was asked for could not be imported or registered; chained to the cause."""


class PluginContractError(PluginError):
    """A plugin answered a hook with something that breaks the hook's contract."""


class NoBackendError(PluginError):
    """No installed plugin can serve the request; the message lists each one's reason."""


class UnknownBackendError(PluginError):
    """A framework, backend or plugin was asked for by a name that nobody provides."""


class AmbiguousBackendError(PluginError):
    """Two candidates are equally good; the message names the setting that decides."""


class UnsupportedFeatureError(ParallelKitError):
    """The chosen backend lacks the feature; raised before any rendezvous."""


class WrongThreadError(ParallelKitError):
    """A framework that is not thread safe was used in a second thread."""


# --- launch and process groups -----------------------------------------------------------------


class LaunchError(ParallelKitError):
    """The launcher's environment variables are partial, malformed or contradict each other."""


class GroupError(ParallelKitError):
    """Base of process-group errors."""


class NotInitializedError(GroupError):
    """Something needs a process group and none is open."""


class AlreadyInitializedError(GroupError):
    """A process group is open with another specification; the message shows both."""


class GroupClosedError(GroupError):
    """A collective was called on a group that was closed."""


class PortInUseError(GroupError):
    """The rendezvous port is taken; the message names host, port and the setting to change."""


class DeviceError(GroupError):
    """The device asked for does not exist here, or the local rank has none."""


class RendezvousTimeoutError(GroupError):
    """Not every rank arrived in time.

    Attributes:
        missing: the ranks that did not arrive, as far as known.
    """

    def __init__(self, message: str, *, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class CollectiveError(GroupError):
    """A collective failed: a peer is gone, or shapes or arguments differ.

    Attributes:
        gone: the ranks that are gone, as far as known.
    """

    def __init__(self, message: str, *, gone: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.gone = tuple(gone)


class CollectiveTimeoutError(CollectiveError):
    """A collective did not finish within the group's timeout.

    Attributes:
        missing: the ranks that did not take part, as far as known.
    """

    def __init__(self, message: str, *, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class RankMismatchError(GroupError):
    """Ranks disagree about something all must share; the message has a table by rank."""


class NotPlainError(GroupError):
    """An object to be sent is not made of None, bool, int, float, str, bytes, list and dict."""


# --- plan, context, data, execution ------------------------------------------------------------


class PlanError(ParallelKitError):
    """The degrees of a parallel plan are impossible for the world size."""


class LayoutError(PlanError):
    """A tensor layout matches nothing, is unknown, or does not divide the layer it is for."""


class StrategyError(PlanError):
    """A strategy or layout of MindSpore's cannot be read, is damaged, or is for other ranks."""


class StageError(PlanError):
    """A model cannot be cut into the pipeline stages asked for."""


class ContextOrderError(ParallelKitError):
    """Something that reads a parallel context when it is built was built before it."""


class GradientError(ParallelKitError):
    """Gradients that are needed are not there, or were not reduced over the ranks."""


class MovedParameterError(ParallelKitError):
    """A parameter was given other memory than what was compiled with it; training would stand."""


class NonFiniteGradientError(ParallelKitError):
    """The norm of the gradients is infinite or not a number."""


class CheckpointError(ParallelKitError):
    """A checkpoint cannot be written there, is incomplete, or is not this model's."""


class ExampleError(PlanError):
    """An example batch does not run through the model that it is given for."""


class NoPlanError(PlanError):
    """No plan fits the memory and the limits given; the message has the smallest need found.

    Attributes:
        needed_bytes: memory per device that the most frugal possible plan needs; None where no
            degrees are possible whatever the memory.
    """

    def __init__(self, message: str, *, needed_bytes: int | None = None) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


class DataShardError(ParallelKitError):
    """A data set cannot be sharded as asked."""


class DataStateError(DataShardError):
    """A loader's saved state is damaged, or belongs to other data or settings.

    Attributes:
        differences: one line for each difference.
    """

    def __init__(self, message: str, *, differences: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


class UnknownLengthError(DataShardError, TypeError):
    """The number of batches of a stream without `__len__` was asked for.

    A `TypeError` too, as Python's `len` and `list` expect of what has no length.
    """


class ExecutionModeError(ParallelKitError):
    """An execution mode is unknown, or cannot be applied to the object given."""


class FunctionFailedError(ExecutionModeError):
    """A function raised while `check_graph` or `compare_modes` ran it; chained to the cause."""


# --- weight transfer ---------------------------------------------------------------------------


class WeightTransferError(ParallelKitError):
    """Base of weight-transfer errors."""


class ManifestError(WeightTransferError):
    """A model or manifest cannot be published: a bad name, dtype, shape or alias."""


class NonFiniteError(ManifestError):
    """The model holds NaN or infinity, and `check_finite` was asked for; nothing was sent.

    Attributes:
        tensors: names of the tensors that do.
    """

    def __init__(self, message: str, *, tensors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)


class ManifestMismatchError(WeightTransferError):
    """The publisher's manifest is not exactly what the target needs.

    Attributes:
        differences: one line for each difference.
    """

    def __init__(self, message: str, *, differences: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


class CoverageError(ManifestMismatchError):
    """The members of a group together do not keep everything that is published.

    Attributes:
        differences: one line for each tensor, with the boxes that nobody keeps.
    """


class NeedsError(WeightTransferError):
    """What a member says it keeps cannot be regions of the published tensors."""


class LoaderError(WeightTransferError):
    """A loader raised, or did other than it did when it was watched; chained to the cause."""


class TicketError(WeightTransferError):
    """A ticket is malformed, altered, expired, or used already."""


class ProtocolError(WeightTransferError):
    """A peer sent something that the protocol does not allow here; nothing of it was applied."""


class TransportError(WeightTransferError):
    """Bytes cannot be moved: no transport reaches the peer, or a segment cannot be used."""


class EpochError(TransportError):
    """The publisher is at another epoch: it went on, and what was read is void."""


class StateError(WeightTransferError):
    """The call is not allowed in the present state; the message names both."""


class VersionError(StateError):
    """A version number that does not move forward."""


class PeerLostError(WeightTransferError):
    """The other side of a session is gone.

    Attributes:
        peers: names of the peers that are gone.
    """

    def __init__(self, message: str, *, peers: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.peers = tuple(peers)


class UpdateTimeoutError(WeightTransferError):
    """A phase of an update passed its deadline.

    Attributes:
        missing: names of the peers that were waited for.
    """

    def __init__(self, message: str, *, missing: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class UpdateAbortedError(WeightTransferError):
    """An update ended before its decision: every member kept its old version.

    Attributes:
        failures: member name to reason.
    """

    def __init__(self, message: str, *, failures: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.failures = dict(failures or {})


class CorruptionError(WeightTransferError):
    """Bytes that arrived are not the bytes that were sent.

    Attributes:
        tensors: names of the tensors whose digest differs.
    """

    def __init__(self, message: str, *, tensors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)


class PartialCommitError(WeightTransferError):
    """An update was decided and committed, but not every member could put it in place.

    The version has moved. Members not named are at the new version; those named are quarantined,
    serve nothing and come back by the next update, or are lost.

    Attributes:
        report: the `TransferReport` of the update.
    """

    def __init__(self, message: str, *, report: object = None) -> None:
        super().__init__(message)
        self.report = report


class QuarantinedError(WeightTransferError):
    """The subscriber's weights are not those of any version; it serves nothing.

    It comes back by the next full commit. The message says what happened.
    """


class EngineError(WeightTransferError):
    """An inference engine cannot be attached, or refused or failed a call; the message names it."""


class EngineCommitError(EngineError):
    """An engine failed while a decided version was put in place; it generates nothing until a
    later commit works.

    Attributes:
        step: what failed, such as `update_weights`.
    """

    def __init__(self, message: str, *, step: str = "") -> None:
        super().__init__(message)
        self.step = step


class UnguardedEngineError(EngineError):
    """A server's admin routes, or the way to it, would be open to anyone: refused."""


class EngineTokenError(EngineError):
    """The token of a server's guard is missing, too weak or another one."""
