"""Every exception a user can meet.

A message names the rule, the values and the remedy. Nothing here imports anything.
"""


class ArchipelError(Exception):
    """Root of every error archipel raises on purpose."""


class ConfigError(ArchipelError):
    """An option is unknown, has the wrong type or breaks a rule."""


class DataError(ArchipelError):
    """A corpus, token file or batch request is unusable."""


class ModelError(ArchipelError):
    """A model cannot be built, split into fragments or loaded."""


class TransportError(ArchipelError):
    """The network refused us for good: a bad address, a port in use, a failed handshake."""


class SecurityError(TransportError):
    """A certificate is missing, expired or not signed by the run's authority."""


class JoinRefused(ArchipelError):
    """The syncer refused this worker: another run, protocol version or model."""


class PayloadError(ArchipelError):
    """Bytes that do not decode to the tensor they claim to be, or hold values that may not be merged."""


class CheckpointError(ArchipelError):
    """No valid checkpoint where one is needed, or one that belongs to another run."""


class TapeError(ArchipelError):
    """A tape is damaged, of another format, or does not belong to the run."""


class WorkerDied(ArchipelError):
    """A process this one depends on is gone (courier, trainer or syncer)."""
