"""What a simulated engine raises, each with the status and type that vLLM gives it.

    SimError               answered as {"error": {"message", "type", "param", "code"}}
    ├── BadRequest         400, vLLM's validation errors
    ├── NotFound           404, an unknown model or adapter
    ├── Unavailable        503, a paused server that rejects (vLLM 0.33)
    ├── CallFailed         500, "Call to … method failed: …"
    │   └── WorkerFailed   the same from collective_rpc
    └── EngineDead         500, on every call once the engine process is gone

The texts are those of vLLM 0.32. Unknown paths and wrong methods never come this far.
"""

from typing import ClassVar


class SimError(Exception):
    """Base of the tree; `status` and `kind` are the class's."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "InternalServerError"

    def __init__(self, message: str, *, param: str | None = None, kind: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self._kind = kind or self.kind

    def body(self) -> dict[str, object]:
        """The JSON body of the answer."""
        return error_body(self.message, self._kind, self.status, self.param)


class BadRequest(SimError):
    """The request does not validate."""

    status = 400
    kind = "Bad Request"


class NotFound(SimError):
    """The request names a model or adapter that is not there."""

    status = 404
    kind = "NotFoundError"


class Unavailable(SimError):
    """The server is paused and rejects new requests."""

    status = 503
    kind = "ServiceUnavailableError"


class CallFailed(SimError):
    """A call to the engine core raised."""

    def __init__(self, cause: object, method: str) -> None:
        super().__init__(f"Call to {method} method failed: {cause}")


class WorkerFailed(CallFailed):
    """A call to the engine's workers raised."""

    def __init__(self, cause: object, method: str = "collective_rpc") -> None:
        super().__init__(
            f"Worker failed with error '{cause}', "
            "please check the stack trace above for the root cause",
            method,
        )


class EngineDead(SimError):
    """The engine process is gone; the server exits soon."""

    def __init__(self) -> None:
        super().__init__(
            "EngineCore encountered an issue. See stack trace (above) for the root cause."
        )


def error_body(message: str, kind: str, code: int, param: str | None = None) -> dict[str, object]:
    """vLLM's error shape (`entrypoints/serve/engine/protocol.py: ErrorResponse`)."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
