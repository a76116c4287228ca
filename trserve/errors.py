"""The errors that a user can meet. Knows nothing of HTTP frameworks, processes or torch.

Everything a user did wrong, or that the machine lacks, is one of these; any other exception is a
bug. Each message says what is wrong, names the parameter, and says what to do.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3
EXIT_PORT_IN_USE = 4
EXIT_WORKER_LOST = 5


class TrserveError(Exception):
    """Base of every error that is reported to a user in one message, without a traceback."""


class RequestError(TrserveError):
    """A request that is refused, as the OpenAI error envelope shows it.

    Args:
        message: one sentence for the person who sent the request.
        status: HTTP status.
        param: name of the offending request field, or None.
        code: machine-readable code, for example ``context_length_exceeded``.
        retry_after: seconds after which a retry makes sense (sent as ``Retry-After``).
        allow: the methods that a route takes (sent as ``Allow``, with status 405).
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.allow = allow

    @property
    def type(self) -> str:
        """The envelope's ``type``, derived from the status as vLLM and OpenAI do."""
        return _ERROR_TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )


_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class StartupError(TrserveError):
    """A server that cannot start; carries the exit code of the launcher."""

    exit_code: int = EXIT_UNAVAILABLE


class ConfigError(StartupError):
    """Usage or configuration is wrong (exit code 2); the message names the flag."""

    exit_code = EXIT_USAGE


class ModelUnavailableError(StartupError):
    """A model or device is not on this machine (exit code 3)."""

    exit_code = EXIT_UNAVAILABLE


class StartFailedError(StartupError):
    """The system would not start one of the server's processes (exit code 3)."""


class PortInUseError(StartupError):
    """The address is taken (exit code 4)."""

    exit_code = EXIT_PORT_IN_USE
