"""Several processes that serve one port: started, watched, replaced, and stopped together.

Each is a whole gateway of its own and meets the others in the store (fleet/gateways/peers.py). The
kernel spreads connections over them (SO_REUSEPORT, Linux 3.9), so none of them waits for another.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from time import monotonic, sleep
from typing import Final

log = logging.getLogger(__name__)

SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
FAILS_TO_START_S: Final = 5.0
"""If one ends sooner than this and none has lived longer, none would: then all of them stop."""
AGAIN_S: Final = 1.0
"""How long to wait before one that ended so soon is replaced."""

Work = Callable[[], object]


class FirstOfAll:
    """Says yes once, to whichever of the processes that were forked since asks first."""

    def __init__(self) -> None:
        self._token, held = os.pipe()
        os.write(held, b"1")
        os.close(held)

    def __call__(self) -> bool:
        """Take the token that is there only once."""
        return bool(os.read(self._token, 1))


def supervise(count: int, work: Work) -> int:
    """Run `work` in `count` processes until SIGTERM or SIGINT; return the exit status.

    A worker that dies is replaced, unless none could be started. That one is killed twice in a row,
    for its memory say, must not take the rollouts of the others along. The workers end with this
    process, however it ends.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    watched, held = os.pipe()
    born = {_start(work, watched, held): monotonic() for _ in range(count)}
    is_stopping, could_start, status = False, False, 0
    while born:
        if signal.sigwait(SIGNALS) != signal.SIGCHLD:
            is_stopping = True
            _stop(born)
            continue
        for pid, ended_with in _ended():
            could_start = could_start or monotonic() - min(born.values()) >= FAILS_TO_START_S
            ended_soon = monotonic() - born.pop(pid) < FAILS_TO_START_S
            if is_stopping:
                continue
            log.warning("worker died", extra={"pid": pid, "status": ended_with})
            if not could_start:
                is_stopping, status = True, 1
                _stop(born)
                continue
            if ended_soon:
                sleep(AGAIN_S)
            born[_start(work, watched, held)] = monotonic()
    return status


def _start(work: Work, watched: int, held: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.close(held)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        threading.Thread(target=_end_with_parent, args=(watched,), daemon=True).start()
        work()
        status = 0
    except Exception:  # the last place where a worker can say why it ends
        log.exception("worker failed")
    finally:
        os._exit(status)


def _end_with_parent(watched: int) -> None:
    """Wait until nobody holds the pipe's other end any more."""
    os.read(watched, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _stop(born: dict[int, float]) -> None:
    for pid in born:
        os.kill(pid, signal.SIGTERM)


def _ended() -> Iterator[tuple[int, int]]:
    """Yield every worker that has ended since the last look: signals of the kind are merged."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)
