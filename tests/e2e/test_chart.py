"""The arguments that the Helm chart gives to vLLM are ones that a real vLLM takes."""

import pytest

from tests.chart.helm import SHAPES, TOOLS, component_of, render

pytestmark = pytest.mark.e2e

GIVEN_BY_LWS = {"$(LWS_LEADER_ADDRESS)": "leader.example", "$(LWS_WORKER_INDEX)": "1"}


@pytest.mark.skipif(not (TOOLS / "helm4").exists(), reason="needs the tools of make test-chart")
def test_vllm_takes_the_arguments_of_every_shape() -> None:
    """`vllm serve` of this version parses them, and none means something else by then."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    seen: set[str] = set()
    for shape in SHAPES:
        for template in render(shape).templates():
            component = str(component_of(template))
            if not component.startswith("replica"):
                continue
            words = template["spec"]["containers"][0]["args"]
            for written, meant in GIVEN_BY_LWS.items():
                words = [word.replace(written, meant) for word in words]
            given = parser.parse_args(words)
            assert given.model_tag == words[0]
            assert given.headless == (component == "replica-worker")
            assert given.shutdown_timeout > 0
            assert given.weight_transfer_config.backend in ("nccl", "gloo")
            seen.add(component)
    assert seen == {"replica", "replica-worker"}
