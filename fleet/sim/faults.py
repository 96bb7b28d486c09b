"""Scripted faults: which call goes wrong, when, how and how often.

Rules are matched in order; the first that fits a request is used and counted down. It decides
only; `server.py` carries the decision out.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Action = Literal["delay", "status", "hang", "die", "restart", "lie", "drop"]
When = Literal["before", "after", "during"]
_FOREVER = 0


@dataclass
class Fault:
    """One rule.

    `path` is exact, or ends in ``*`` for a prefix. `action`:
    ``delay`` waits `seconds`; ``status`` answers `status` with `body`; ``hang`` never answers;
    ``die`` stops listening and breaks every connection, as SIGKILL would; ``restart`` dies and is
    back on the same port after `seconds`, with initial weights; ``lie`` answers 200 with an error
    as its body; ``drop`` closes the connection without an answer.

    `when`: ``before`` the call has an effect, ``after`` it (so the answer is lost, late or
    wrong), or ``during`` a streamed generation, once `tokens` tokens were sent.

    `times` 0 means always. A rule that is counted, for an exact path, is not used up by a request
    in a method that the path does not serve: gateways probe for routes in that way.
    """

    path: str
    action: Action
    seconds: float = 1.0
    status: int = 500
    body: Any = None
    times: int = 1
    when: When = "before"
    tokens: int = 1

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise ValueError(f"action must be one of {get_args(Action)}, got {self.action!r}")
        if self.when not in get_args(When):
            raise ValueError(f"when must be one of {get_args(When)}, got {self.when!r}")

    def matches(self, path: str, *, served: bool = True) -> bool:
        """Whether a request path falls under this rule; `served` says that its method fits it."""
        if self.path.endswith("*"):
            return path.startswith(self.path[:-1])
        return path == self.path and (served or self.times == 0)

    def answer_body(self) -> Any:
        """The body for ``status`` and ``lie``; vLLM's error shape unless the rule has its own."""
        if self.body is not None:
            return self.body
        code = self.status
        message = "scripted fault"
        return {"error": {"message": message, "type": "InternalServerError", "code": code}}


class Faults:
    """The rules of one replica; they outlive its restarts."""

    def __init__(self) -> None:
        self._rules: list[Fault] = []

    def add(self, path: str, action: Action, **fields: Any) -> Fault:
        """Add a rule; the keywords are the fields of `Fault`. Raises ValueError, TypeError."""
        rule = Fault(path, action, **fields)
        self._rules.append(rule)
        return rule

    def add_json(self, fields: Mapping[str, Any]) -> Fault:
        """Add a rule from the body of POST /sim/faults. Raises ValueError for a bad one."""
        try:
            return self.add(**fields)
        except TypeError as error:
            raise ValueError(f"bad fault: {error}") from error

    def clear(self) -> None:
        """Remove all rules; calls that hang already go on hanging."""
        self._rules.clear()

    def take(self, path: str, *, served: bool = True) -> Fault | None:
        """The rule for a request that arrives, counted down; used-up rules go away."""
        return self._first(lambda rule: rule.matches(path, served=served) and rule.when != "during")

    def take_during(self, path: str, tokens: int) -> Fault | None:
        """The rule for a stream of which `tokens` tokens were sent."""
        return self._first(
            lambda rule: rule.matches(path) and rule.when == "during" and rule.tokens == tokens
        )

    def as_json(self) -> list[dict[str, Any]]:
        """The rules that are left, for GET /sim/faults."""
        return [asdict(rule) for rule in self._rules]

    def _first(self, fits: Callable[[Fault], bool]) -> Fault | None:
        for rule in self._rules:
            if fits(rule):
                return self._use(rule)
        return None

    def _use(self, rule: Fault) -> Fault:
        if rule.times != _FOREVER:
            rule.times -= 1
            if rule.times == 0:
                self._rules.remove(rule)
        return rule
