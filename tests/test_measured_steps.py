"""What decode steps measure for a choice that is still open."""

from __future__ import annotations

import torch
from stepped_requests import N_STEPS, SHORT, Request

from lighttransfer.cache.last_queries import LastQueries, MeasuredSteps


def test_measured_steps_come_in_their_order() -> None:
    steps = 11
    masses, queries, outs = torch.rand(steps, 2, 4, 2), torch.rand(steps, 2, 1, 4, 8), torch.rand(steps, 2, 1, 4, 8)
    lses, place = torch.rand(steps, 2, 4, 1), torch.zeros(1, dtype=torch.int64)
    measured = MeasuredSteps(3, (2, 4, 8), torch.float32, torch.device("cpu"), with_outputs=True)
    for step in range(steps):
        place.fill_(step % 3)
        measured.write(place, masses[step], LastQueries(queries[step], outs[step], lses[step], 0.5, None))
        last = slice(max(0, step - 2), step + 1)
        assert torch.equal(measured.masses(step + 1), masses[last].permute(1, 2, 0, 3))
        remembered = measured.queries(step + 1)
        assert remembered is not None
        assert torch.equal(remembered.q, queries[last, :, 0].transpose(0, 1))
        assert torch.equal(remembered.out, outs[last, :, 0].transpose(0, 1))
        assert torch.equal(remembered.lse, lses[last, ..., 0].permute(1, 2, 0))
        assert (remembered.scale, remembered.sink_logit) == (0.5, None)


@torch.no_grad()
def test_measuring_starts_anew_after_a_turn() -> None:
    """A turn of several tokens decides one row while its steps are measured; the other row measures later."""
    request = Request({"full_layers": 2}, [SHORT[0], SHORT[1][:1]])
    for _ in range(6):
        request.take(request.forward())
    assert request.cache.decoding.mass_n_recent >= 0
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, :7] = mask[1, 14] = 0  # one row's turn is one token, which leaves it inside the window
    request.take(
        request.model(input_ids=torch.tensor([[5, 6], [0, 8]]), attention_mask=mask, cache=request.cache).logits
    )
    assert [report.is_decided for report in request.cache.report().requests] == [True, False]
    request.position.add_(1)
    for _ in range(N_STEPS):
        request.take(request.forward())
    assert all(report.is_decided for report in request.cache.report().requests)
