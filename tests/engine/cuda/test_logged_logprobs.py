"""The logprobs that the sampler records with exact numerics, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton")

from tunesmith.engine.cuda.kernels.sample import SamplingTensors, log_trainer_logprobs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_only_rows_that_sample_from_the_whole_distribution_log_the_trainer_s_logprob():
    torch.manual_seed(0)
    settings = [(1.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.1)]
    temperatures, top_ks, top_ps, min_ps = torch.tensor([*settings, settings[0]], device=DEVICE).T.contiguous()
    logits_RV = torch.randn(6, 97, device=DEVICE) * 3
    places = [[3, 0, 96, 5, 5, 50], [7, 9, 2, 4, 30, 1], [-6, -8, 0, 0, -28, 1]]
    ids_R, positions_R, first_lines_R = torch.tensor(places, device=DEVICE)
    logged_LR = torch.full((6, 8), 9.0, device=DEVICE)
    rows = SamplingTensors(
        ids_R=ids_R, positions_R=positions_R, seeds_R=ids_R, temperatures_R=temperatures, top_ks_R=top_ks.int(),
        top_ps_R=top_ps, min_ps_R=min_ps, log_lines_R=first_lines_R, token_log_LR=logged_LR.int(),
        logprob_log_LR=logged_LR, entropy_log_LR=logged_LR,
    ).narrow(0, 6)  # fmt: skip
    log_trainer_logprobs(logits_RV, rows)
    expected_LR = torch.full((6, 8), 9.0, device=DEVICE)
    for row in (0, 5):
        expected_LR[first_lines_R[row] + positions_R[row], row] = logits_RV[row].log_softmax(-1)[ids_R[row]]
    torch.testing.assert_close(logged_LR, expected_LR)
