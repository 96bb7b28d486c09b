"""The subject of this run, shared by all tests that leave it as they found it."""

from collections.abc import Generator
from pathlib import Path

import pytest

from fleet.sim.trainer import SimTrainer
from tests.conformance.server import Server
from tests.conformance.subjects import STARTERS, Subject, chosen

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests against a real server are end-to-end tests, and slow."""
    if chosen() != "vllm":
        return
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Generator[Subject]:
    """The server that most tests share."""
    with STARTERS[chosen()](tmp_path_factory.mktemp("subject")) as running:
        yield running


@pytest.fixture
def server(subject: Subject) -> Generator[Server]:
    """A client of the shared server, which is put back into order afterwards."""
    client = Server(subject.url, subject.model)
    yield client
    client.post("/abort_requests", {})
    client.post("/finish_weight_update")  # refused unless a session is open
    client.ok("/wake_up")
    client.ok("/resume")
    client.close()


@pytest.fixture
def trainer(subject: Subject, server: Server) -> Generator[SimTrainer]:
    """A trainer that has formed a group with the shared server."""
    del server  # only its clean-up is wanted, after the trainer's own
    rank0 = SimTrainer(subject.url, timeout_s=30.0)
    rank0.init()
    yield rank0
    rank0.close()


@pytest.fixture
def disposable(tmp_path: Path) -> Generator[Server]:
    """A client of a server of one's own, to be killed."""
    with STARTERS[chosen()](tmp_path) as running:
        client = Server(running.url, running.model)
        yield client
        client.close()
