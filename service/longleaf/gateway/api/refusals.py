"""What clients are told when admission refuses."""

from longleaf.gateway.admission.admission import NoReplicaError, SaturatedError
from longleaf.gateway.admission.demand import NeverFitsError, TooManyCompletionsError
from longleaf.gateway.admission.intake import UnknownModelError
from longleaf.gateway.admission.limits import KeyLimitError
from longleaf.gateway.api import errors
from longleaf.gateway.prompts.inspection import WrongBodyError
from longleaf.gateway.prompts.pool import PoolFullError, WorkerError

_SATURATED = {
    "queue_full": "All replicas are saturated and the gateway's queue is full. Retry later.",
    "queue_timeout": "All replicas stayed saturated for as long as a request may wait. "
    "Retry later.",
}

REFUSALS = (
    UnknownModelError,
    NoReplicaError,
    NeverFitsError,
    KeyLimitError,
    SaturatedError,
    WrongBodyError,
    WorkerError,
    PoolFullError,
)
"""What ``refusal`` takes."""


def refusal(error: Exception, model: str, retry_after: float) -> errors.ApiError:
    """The client's error for one of ``REFUSALS``; ``retry_after`` (seconds) where no replica is."""
    match error:
        case WrongBodyError():
            return errors.invalid_request(str(error), error.param)
        case WorkerError():
            return errors.service_unavailable("The body could not be read now.", retry_after)
        case PoolFullError():
            return errors.rate_limit_exceeded(error.retry_after, f"{error} Retry later.")
        case UnknownModelError():
            return errors.model_not_found(model)
        case NoReplicaError():
            return errors.service_unavailable("No replica is ready.", retry_after)
        case TooManyCompletionsError():
            return errors.invalid_request(str(error), error.param)
        case NeverFitsError():
            return errors.context_length_exceeded(str(error), error.param)
        case KeyLimitError():
            return errors.rate_limit_exceeded(error.retry_after, f"{error} Retry later.")
        case SaturatedError():
            return errors.rate_limit_exceeded(error.retry_after, _SATURATED[error.reason])
        case _:
            raise error
