"""Tensor parallelism inside DeepSpeed's engines, on four gloo ranks; skipped without DeepSpeed."""

import importlib.util

import pytest

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)

import deepspeed_tensor as tasks  # noqa: E402
from ranks import run_ranks  # noqa: E402
from tensor_parallel import BF16_ERRORS, FP32_ERRORS, fp8_error  # noqa: E402



# Pipeline stages, data ranks, tensor ranks.
@pytest.fixture(scope="module", params=[(2, 1, 2), (1, 2, 2)], ids=["pipeline", "plain"])
def results(request, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    return run_ranks(4, tasks.walk, request.param, folder, timeout=180)


def check_training(results, name, data_ranks):
    bounds = FP32_ERRORS if name == "fp32" else BF16_ERRORS
    fp8 = fp8_error(tasks.PARTS // data_ranks) if "O3" in name else 0
    for r in results:
        assert r["effective"][:3] == (name[:4], "fp8_e4m3" if "O3" in name else "fp32", 1)
        assert r["effective"][3] == data_ranks
        assert r["errors"] and max(r["errors"].values()) <= bounds["gradient"] + fp8, r
        assert r["norm"] == pytest.approx(1, rel=bounds["norm"])
        assert r["losses"] == pytest.approx(r["expected"], rel=bounds["loss"])


def check_copies(results):
    """Replicated parameters over tensor ranks, slices of the tied embedding over stages."""
    seen = {}
    for r in results:
        stage, tensor = r["place"]
        for parameter, digest in r["digests"].items():
            tied = parameter == "emb.weight"
            key = ("tied", tensor) if tied else (stage, parameter)
            if tied or parameter in r["replicated"]:
                assert seen.setdefault(key, digest) == digest
    assert seen["tied", 0] != seen["tied", 1]


@pytest.mark.parametrize("name", tasks.CONFIGS)
def test_gradient_norm_and_training(results, name):
    check_training([r[name] for r in results], name, 1 if results[-1][name]["place"][0] else 2)


@pytest.mark.parametrize("name", tasks.CONFIGS)
def test_copies_stay_bit_equal(results, name):
    check_copies([r[name] for r in results])


def test_two_stages_two_data_ranks_two_tensor_ranks():
    name = "bf16 fp32"
    results = [r[name] for r in run_ranks(8, tasks.walk_one, (2, 2, 2), name, timeout=180)]
    check_training(results, name, 2)
    check_copies(results)


def test_checkpoint_resumes_bit_for_bit(results):
    assert all(r["resumed"] for r in results)
