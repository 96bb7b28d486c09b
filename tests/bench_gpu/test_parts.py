"""Pieces of bench/gpu that decide something: ranks and variables, checks, labels, figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu.evidence import Evidence, ratio, spread
from bench.gpu.models import SHAPES, count
from bench.gpu.options import Options, not_run, options_from, parser
from bench.gpu.rollouts import Answer, Crowd


def options(*argv: str) -> Options:
    """What a command line means for the dense script."""
    return options_from(parser("a script"), "nccl", argv)


def test_ranks_that_share_a_gpu_are_told_so_and_others_are_not() -> None:
    """NCCL 2.30 takes several ranks on a GPU only if each knows; alone they get the whole GPU."""
    same = options("--replicas", "2").environment
    assert (same["NCCL_MULTI_RANK_GPU_ENABLE"], same["NCCL_MAX_CTAS"]) == ("1", "2")
    apart = options("--placement", "separate", "--replicas", "1").environment
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in apart
    crowded = options("--placement", "separate", "--replicas", "1,3").environment
    assert crowded["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert options("--replicas", "2", "--ctas", "8").environment["NCCL_MAX_CTAS"] == "8"


@pytest.mark.parametrize("placement", ["same", "separate", "spread"])
def test_multicast_is_off_in_every_rank(placement: str) -> None:
    """Whatever the placement."""
    found = options("--placement", placement).environment
    assert found["NCCL_NVLS_ENABLE"] == "0"
    assert found["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    assert found["NVSHMEM_DISABLE_NVLS"] == "1"


def test_placements_name_the_gpus_of_each_replica_and_how_many_there_must_be() -> None:
    """Trainer on GPU 0 in all of them."""
    same, apart, spread_out = (
        options("--placement", p, "--replicas", "2") for p in ("same", "separate", "spread")
    )
    assert [same.gpu_of_replica(n) for n in range(2)] == [(0,), (0,)]
    assert [apart.gpu_of_replica(n) for n in range(2)] == [(1,), (1,)]
    assert [spread_out.gpu_of_replica(n) for n in range(2)] == [(1,), (2,)]
    assert [o.needs_gpus for o in (same, apart, spread_out)] == [1, 2, 3]
    assert not_run(apart.but(gpus=1)) == "not run: needs 2 GPUs, 1 is here"
    assert not_run(apart.but(gpus=2)) is None
    assert not_run(options("--dry-run")) is None


def test_models_have_about_the_parameters_that_they_are_named_after() -> None:
    """Random ones; the tiny one is for rehearsals."""
    assert count("1b") == pytest.approx(1e9, rel=0.05)
    assert count("8b") == pytest.approx(8e9, rel=0.05)
    assert max(2 * s["vocab"] * s["hidden"] for s in SHAPES.values()) < 2**30  # fits an ipc buffer


def test_a_check_that_fails_fails_the_run_and_an_aim_that_is_missed_does_not(
    tmp_path: Path,
) -> None:
    """And a part that raises is a failed check; what comes after it still runs."""
    with Evidence(tmp_path / "a.txt", "a", ["a fact"]) as evidence:
        evidence.aim(False, "fast")
        assert evidence.status == 0
        with evidence.part("one"):
            raise RuntimeError("broken")
        evidence.line("and on")
        assert evidence.status == 1
    told = (tmp_path / "a.txt").read_text()
    assert "aim   MISSED  fast" in told
    assert "check FAILED  one: RuntimeError: broken" in told
    assert "and on" in told
    assert "result: 1 checks FAILED, 1 aims missed" in told


def test_figures_are_medians_with_their_range() -> None:
    """Nothing to compare with is no ratio."""
    assert spread([0.001, 0.009, 0.002]) == "2.0 ms (1.0–9.0)"
    assert ratio([2.0, 4.0, 3.0], [1.5, 1.5]) == 2.0
    assert ratio([1.0], []) != ratio([1.0], [])


def test_a_label_is_wrong_if_that_version_was_not_in_force_between_question_and_answer() -> None:
    """One more than was known may be: its commit is answered later than it is in force."""
    crowd = Crowd("http://x", 1, versions=["default", "1", "2", "3"])

    def answer(version: str, ended: str, before: int, after: int) -> Answer:
        return Answer(tokens=1, version=version, ended=ended, known=(before, after))

    right = [answer("1", "1", 2, 2), answer("1", "2", 2, 2), answer("default", "1", 1, 2)]
    crowd.answers = [*right, answer("default", "1", 2, 2), answer("1", "3", 2, 2)]
    assert crowd.mislabelled() == crowd.answers[3:]
