"""Fixtures around real vLLM servers.

`real_fleet` is two servers that live for the whole session (a minute or two to boot) and are
brought back for the next test if one killed them. Tests share them, so a test must not rely on
the weights that it finds, and leaves no update open and nothing paused.

`gateway` is a `fleet serve` of one's own in front of both, with no version committed yet.

Without vLLM in the environment nothing in this folder is collected.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAS_VLLM else ["test_*.py"]

_NOISY = ("transformers", "vllm.distributed.weight_transfer.factory", "trl.generation")

if HAS_VLLM:
    # Imported once, here, where the project's "warnings are errors" does not reach.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _NOISY:
            importlib.import_module(name)

    from tests.e2e.gateway_process import RunningGateway, running_gateway
    from tests.e2e.real_vllm import RealFleet, RealServer, running_fleet
    from tests.e2e.tiny_model import save_model

    _HERE = Path(__file__).parent
    _TEST_TIMEOUT_S = 600

    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        """Mark what lives here: `e2e`, time to boot, and other people's warnings let through."""
        for item in items:
            if item.path.is_relative_to(_HERE):
                item.add_marker(pytest.mark.e2e)
                item.add_marker(pytest.mark.timeout(_TEST_TIMEOUT_S))
                item.add_marker(pytest.mark.filterwarnings("default"))

    @pytest.fixture(scope="session")
    def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The tiny model of seed 0, with its tokenizer."""
        return save_model(tmp_path_factory.mktemp("tiny-model"), seed=0)

    @pytest.fixture(scope="session")
    def _session_fleet(
        model_dir: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[RealFleet]:
        with running_fleet(model_dir, tmp_path_factory.mktemp("vllm-logs")) as fleet:
            yield fleet

    @pytest.fixture
    def real_fleet(_session_fleet: RealFleet) -> RealFleet:
        """Two healthy real servers, each an independent replica."""
        _session_fleet.revive()
        return _session_fleet

    @pytest.fixture
    def real_server(real_fleet: RealFleet) -> RealServer:
        """The first server of `real_fleet`."""
        return real_fleet.servers[0]

    @pytest.fixture
    def gateway_settings() -> dict[str, str]:
        """FLEET_* variables of `gateway`; a test sets them by parametrising this."""
        return {}

    @pytest.fixture
    def gateway(
        real_fleet: RealFleet, tmp_path: Path, gateway_settings: dict[str, str]
    ) -> Iterator[RunningGateway]:
        """A gateway in front of both servers; the fleet is as good as fresh."""
        for server in real_fleet.servers:
            server.settle()
            server.post("/update_weight_version", {"new_version": "default"})
        with running_gateway(
            real_fleet.urls, tmp_path / "gateway.log", gateway_settings
        ) as running:
            # on a busy machine a real server may answer its first probe too late
            running.wait_until(lambda: not {"joining", "wedged"} & set(running.states().values()))
            yield running
