"""zerofp8 inside DeepSpeed's engines, on four gloo ranks; skipped without DeepSpeed."""

import importlib.util

import pytest

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)

import deepspeed_cells  # noqa: E402
import deepspeed_tasks as tasks  # noqa: E402
from ranks import run_ranks  # noqa: E402

RANKS = 4
# One of each model, accumulation, stage and kind of accumulator; the script walks all.
SHORT = [("fp32", "fp32", False, 0), ("bf16", "fp32", False, 1), ("bf16", "fp32", True, 2),
         ("fp16", "fp8", True, 2), ("fp16", "fp16", False, 1), ("bf16", "bf16", True, 1),
         ("fp32", "fp8", False, 0), ("bf16", "fp8", False, 2)]


@pytest.fixture(scope="module", params=[("zerofp8", 2), ("torch", 2), ("zerofp8", 1)],
                ids=["pipeline", "torch's pipeline", "plain"])
def cells(request):
    return run_ranks(RANKS, deepspeed_cells.walk, RANKS, *request.param, 4, SHORT, timeout=180)


@pytest.mark.parametrize("cell", SHORT, ids=str)
def test_cell(cells, cell):
    for result in (r[cell] for r in cells):
        if not deepspeed_cells.runs(cell):
            assert result["status"] == "error" and result == cells[0][cell]
            continue
        assert result["status"] == "right", result
        assert result["norm"] < (3e-2 if cell[1] == "fp8" else 1e-3)
        named = "fp8_e4m3" if cell[1] == "fp8" else cell[1]
        assert result["effective"] == [cell[0], named, cell[2], cell[3]]


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    return run_ranks(RANKS, tasks.pipelines, RANKS, str(tmp_path_factory.mktemp("pp")), timeout=180)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run_ranks(RANKS, tasks.plain, RANKS, str(tmp_path_factory.mktemp("plain")), timeout=180)


@pytest.fixture(params=["pipelines", "plain"])
def both(request):
    return request.getfixturevalue(request.param)


def test_checkpoint_resumes_bit_for_bit(both):
    for r in both:
        assert r["resumed losses"] == r["losses"]
        assert r["resumed weights equal"] and r["lr after resume"] == r["lr"]
        assert r["steps after resume"] == 6


def test_weights_alone_can_be_loaded(both):
    assert all(r["weights only"] for r in both)


def test_scheduler_of_the_config_sets_the_learning_rate(both):
    for r in both:
        assert r["lr"] == pytest.approx([1e-3 * i for i in range(4)])  # its first step is the 0th
        assert r["engine lr"] == pytest.approx(r["lr"][-1])


def test_clipping_acts_once(both):
    """DeepSpeed's default is used, and clipped losses follow the clipped reference."""
    for r in both:
        assert r["clip"] == r["clip default"]
        assert r["clip deviation"] < 1e-5


def test_skipped_step(both):
    """An overflow is skipped once, on all ranks, with the scale halved and the scheduler kept."""
    for r in both:
        assert r["skips"] == [True, False] and r["engine skips"] == 1
        assert r["scales"][1] == r["scales"][0] / 2


def test_activation_checkpointing(both):
    for r in both:
        if r["plain losses"] is None:
            pytest.skip("the activation checkpointing of this DeepSpeed does not run on a CPU")
        assert r["checkpointed losses"] == r["plain losses"]


def test_whole_tensors_by_deepspeeds_functions(both):
    for r in both:
        assert max(r["whole errors"]) < 5e-2  # FP8 accumulator and wire
        assert "safe_set_full_grad" in r["set"] and r["set alike"] and r["detached"]


@pytest.mark.parametrize("dtype, bound", [("fp32", 1e-5), ("bf16", 1e-3)])
def test_same_losses_for_every_layout(plain, dtype, bound):
    """Stages x data ranks: 1 x 4 (the plain engine), 2 x 2, 4 x 1."""
    losses = plain[0]["layouts"]
    for stages in (2, 4):
        assert losses[dtype, stages] == pytest.approx(losses[dtype, 1], rel=bound)
    assert losses[dtype, 1][-1] < 0.9 * losses[dtype, 1][0]


def test_clients_optimizer_and_scheduler(both):
    for r in both:
        assert r["client lr"] == pytest.approx([0.5e-3, 0.25e-3])
        assert r["client losses fall"]


@pytest.mark.parametrize("name, part", [
    ("unknown key", "/gradient_acumulation_dtype"), ("both dtypes", "/fp16"),
    ("stage 3", "/zero_optimization/stage"), ("sharded", "/gradient_accumulation_dtype/sharded"),
    ("optimizer", "/optimizer/type"), ("client", "SGD"),
    ("offload", "/zero_optimization/offload_optimizer"), ("batch", "train_batch_size"),
    ("sequence", "/sequence_parallel_size"), ("experts", "your own loop")])
def test_config_errors_are_the_same_on_all_ranks(plain, name, part):
    texts = {r["errors"][name] for r in plain}
    assert len(texts) == 1
    assert part in texts.pop()


def test_user_backward_and_micro_batches(plain):
    for r in plain:
        assert r["micro batches"] == 2
        assert r["torch style losses"] == r["engine style losses"]
        # Two micro-batches, by which scale_wrt_gas=False does not divide.
        norms = r["first norms"]
        assert norms["undivided"] == pytest.approx(2 * norms["engine"], rel=0.02)
        assert norms["torch"] == norms["engine"]


def test_coalesced_reductions_and_engines_without_an_optimizer(plain):
    for r in plain:
        assert r["without optimizer"] == [True] * 3
        for stage in (0, 1, 2):
            assert r["coalesced"][stage, "coalesced"] == pytest.approx(
                r["coalesced"][stage, "one loss"], rel=0.01)


def test_tied_copies_stay_equal(pipelines):
    assert len({r["tied"] for r in pipelines}) == 1


def test_pipelines_of_a_version_with_wrong_gradients_are_refused(plain):
    for r in plain:
        assert "0.18.9" in r["old pipeline"] and "0.19.6" in r["old pipeline"]


def test_uninstall_restores_deepspeed(plain):
    assert all(r["restored"] for r in plain)


def test_interface_check_names_what_is_missing(plain):
    for r in plain:
        assert "DeepSpeedEngine._save_zero_checkpoint" in r["interface"]
        assert "0.19.8, 0.19.6" in r["interface"]
