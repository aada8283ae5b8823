"""T4: reports of steps with non-finite values."""

import json
from types import SimpleNamespace

import torch

from lumina_ft.train.nonfinite import NonFinite, describe_nonfinite, write_report


def test_T4_report_holds_every_ranks_samples_and_the_message_names_rank_and_place(tmp_path):
    packs = [SimpleNamespace(sample_ids=torch.tensor([3, 8])), SimpleNamespace(sample_ids=torch.tensor([5]))]
    reports = [NonFinite(("backbone", "loss")).with_batches(packs), NonFinite(()).with_batches(packs[1:])]
    path = write_report(tmp_path, "heads", 12, reports)
    assert json.loads(path.read_text()) == [
        {"rank": 0, "places": ["backbone", "loss"], "sample_ids": [[3, 8], [5]]},
        {"rank": 1, "places": [], "sample_ids": [[5]]},
    ]
    message = describe_nonfinite("heads", 12, reports, str(path))
    assert "stage 'heads' step 12" in message
    assert "(rank 0: backbone, loss)" in message
    assert str(path) in message
