"""Reports as dicts, pickles, and curves."""

import json
import logging
import math
import pickle

import pytest
import torch
from ranks import run_ranks
from reference import loss_of, seeded_model

import zerofp8


def started(level="O2"):
    model = seeded_model(width=80)
    optimizer = torch.optim.AdamW(model.parameters())
    return zerofp8.initialize(model, optimizer, {"gradient_clipping": 0.1}, opt_level=level)


def reports(rank):
    """Of an applied step and a skipped one, as pickles between processes."""
    model, optimizer = started()
    loss_of(model, 0, rank, 0).backward()
    applied = optimizer.step()
    (loss_of(model, 1, rank, 0) * math.inf).backward()
    return applied, optimizer.step()


def test_pickles_and_dicts_have_all_that_the_report_has():
    for applied, skipped in run_ranks(2, reports):
        assert applied.applied and applied.clip_coefficient < 1
        assert any("4" in name and sent > 0 for name, sent in applied.wire.items()), applied.wire
        assert not skipped.applied and skipped.bad_parameter and skipped.bad_rank == 0
        for report in (applied, skipped):
            names = {n for n in dir(report) if not n.startswith("_")} - {"as_dict"}
            whole = report.as_dict()
            assert set(whole) == names
            for name in names:
                a, b = getattr(report, name), whole[name]
                assert a == b or (a != a and b != b), name
            again = pickle.loads(pickle.dumps(report))
            assert json.dumps(again.as_dict()) == json.dumps(whole) and repr(again) == repr(report)


class Writer:
    def __init__(self):
        self.rows = []

    def add_scalar(self, tag, value, step):
        self.rows.append((tag, value, step))


def test_summary_writer(caplog):
    model, optimizer = started()
    writer, told = Writer(), {}
    optimizer.register_step_post_hook(zerofp8.summary_writer(writer, prefix="z/", every=2))
    optimizer.register_step_post_hook(
        zerofp8.summary_writer(lambda values, step: told.update({step: values}), prefix=""))
    log = zerofp8.summary_writer(logging.getLogger("curves"))
    for step in range(4):
        factor = math.inf if step == 2 else 1.0  # a skipped step counts
        (loss_of(model, step, 0, 0) * factor).backward()
        report = optimizer.step()
        with caplog.at_level(logging.INFO, "curves"):
            log(report)
        assert told[step + 1]["applied"] == (step != 2)
    assert {s for _, _, s in writer.rows} == {2, 4}
    assert dict((t, v) for t, v, s in writer.rows if s == 4)["z/grad_norm"] == report.grad_norm
    assert told[4]["wire/control"] == report.wire["control"]
    assert "step 4: zerofp8/applied 1, " in caplog.messages[-1]
    with pytest.raises(zerofp8.ArgumentError, match="add_scalar"):
        zerofp8.summary_writer(3)
