"""Decode steps that the host does not see: no host value, no allocation, frozen Python; ``reserve``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import device_only
import pytest
import tiny_models
import torch
from device_only import Forbidden, Recording, no_host
from hybrid_runs import WINDOW, WINDOW_SIZE, streaming
from transformers import PreTrainedModel

import lighttransfer
from lighttransfer.cache import LightTransferCache
from lighttransfer.cache.calls import LastQueries, MeasuredSteps

PAGE = 4
N_STEPS = 20
SETTINGS = {**WINDOW, "n_last": 4, "page_size": PAGE}
LENGTHS = (23, 13, 18)
LONG = [tiny_models.prompt(length, seed=seed) for seed, length in enumerate(LENGTHS)]
SHORT = [
    tiny_models.prompt(length, seed=seed) for seed, length in enumerate((8, 3, 2))
]  # measured, not measured, and measured again

#: Which rows are full and which are rings, and what the steps measure.
CASES = {
    "equal": ({"full_layers": 2}, [prompt[:13] for prompt in LONG]),  # the model counts positions itself
    "full": ({"full_layers": 1.0}, LONG),
    "ring": ({"full_layers": 0}, LONG),
    "mixed": ({"full_layers": 2}, LONG),
    "mass": ({"full_layers": 2}, SHORT),  # a deferred choice: measured, then taken
    "outputs": ({"full_layers": 2, "policy": "output_error"}, SHORT),
}


class Request:
    """A batch in the middle of decoding, stepped by hand with inputs at fixed addresses."""

    def __init__(self, settings: dict[str, object], prompts: list[list[int]], architecture: str = "llama") -> None:
        self.model: PreTrainedModel = tiny_models.build(tiny_models.ARCHITECTURES[architecture]())
        lighttransfer.enable(self.model, **{**SETTINGS, **settings})
        self.cache = LightTransferCache(self.model.config)
        ids, mask = tiny_models.left_pad(prompts)
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        with torch.no_grad():
            out = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, cache=self.cache)
        self.token = out.logits[:, -1:].argmax(-1)
        self.position: torch.Tensor | None = positions[:, -1:] + 1 if len(set(map(len, prompts))) > 1 else None
        self.tokens = [self.token.clone()]

    @torch.no_grad()
    def forward(self) -> torch.Tensor:
        return self.model(input_ids=self.token, position_ids=self.position, cache=self.cache).logits

    def take(self, logits: torch.Tensor) -> None:
        """What the caller does between steps: the next token into the tensor that the step reads."""
        self.token.copy_(logits[:, -1:].argmax(-1))
        if self.position is not None:
            self.position.add_(1)
        self.tokens.append(self.token.clone())

    def answer(self) -> list[list[int]]:
        return torch.cat(self.tokens, 1).tolist()


def stepped(settings: dict[str, object], prompts: list[list[int]], architecture: str = "llama") -> Request:
    """The same request, decoded as everywhere else."""
    request = Request(settings, prompts, architecture)
    for _ in range(N_STEPS):
        request.take(request.forward())
    return request


def assert_same(a: Request, b: Request) -> None:
    assert a.answer() == b.answer()
    assert a.cache.lengths == b.cache.lengths
    assert a.cache.get_seq_length() == b.cache.get_seq_length()
    assert streaming(a.cache) == streaming(b.cache)
    for x, y in zip(a.cache.report().requests, b.cache.report().requests, strict=True):
        assert x.scores == y.scores
        assert (x.length, x.is_decided, x.bytes_held) == (y.length, y.is_decided, y.bytes_held)


@pytest.mark.parametrize("case", CASES)
def test_a_step_needs_no_host_value_and_allocates_nothing(case: str) -> None:
    settings, prompts = CASES[case]
    with device_only.tables_on_a_device():
        request = Request(settings, prompts)
        held = {request.cache.attention_layers[0].pool.n_used}
        for _ in range(N_STEPS):
            with request.cache.decode_step():
                with no_host():
                    logits = request.forward()
                held.add(request.cache.attention_layers[0].pool.n_used)
            request.take(logits)
    expected = stepped(settings, prompts)
    assert_same(request, expected)
    if case != "ring":
        assert len(held) > 2, "no page boundary was crossed"
    if prompts is SHORT:
        assert all(report.is_decided for report in request.cache.report().requests)
    rows = streaming(request.cache)
    assert (len(set(rows)) > 1) == (case not in ("full", "ring")), "rows chose alike"
    assert all(length > 2 * WINDOW_SIZE for length in request.cache.lengths), "no ring has wrapped"


@pytest.mark.parametrize("bracket", [True, False])
@pytest.mark.parametrize("case", ["full", "ring", "mixed"])
def test_reserved_steps_need_the_host_for_nothing(case: str, bracket: bool) -> None:
    """With the pages mapped ahead, what lies between the steps does not touch the device either."""
    settings, prompts = CASES[case]
    with device_only.tables_on_a_device():
        request = Request(settings, prompts)
        request.cache.reserve(N_STEPS)
        key = request.cache.graph_key
        logits = []
        for _ in range(N_STEPS):
            step: Callable[[], AbstractContextManager[None]] = request.cache.decode_step if bracket else nullcontext
            with no_host(), step():
                logits.append(request.forward())
            request.take(logits[-1])
            assert request.cache.graph_key == key
    request.cache.reserve(0)
    assert_same(request, stepped(settings, prompts))


@pytest.mark.parametrize("case", CASES)
def test_a_frozen_step_is_every_step(case: str) -> None:
    """One step recorded and replayed, as a CUDA graph would, gives the answers of the steps that Python runs."""
    settings, prompts = CASES[case]
    with device_only.tables_on_a_device():
        request = Request(settings, prompts)
        recordings: dict[tuple[int, ...], tuple[Recording, torch.Tensor]] = {}
        for _ in range(N_STEPS):
            with request.cache.decode_step():
                key = request.cache.graph_key
                if key in recordings:
                    recording, recorded = recordings[key]
                    logits = recording.replay(recorded)
                else:
                    with Recording() as recording:
                        logits = request.forward()
                    recordings[key] = recording, logits
            request.take(logits)
    assert len(recordings) <= N_STEPS // 2, "hardly anything was replayed"
    assert_same(request, stepped(settings, prompts))


def test_reserved_steps_are_one_recording() -> None:
    settings, prompts = CASES["mixed"]
    with device_only.tables_on_a_device():
        request = Request(settings, prompts)
        request.cache.reserve(N_STEPS)
        with request.cache.decode_step(), Recording() as recording:
            logits = recorded = request.forward()
        for _ in range(N_STEPS - 1):
            request.take(logits)
            with request.cache.decode_step():
                logits = recording.replay(recorded)
        request.take(logits)
    request.cache.reserve(0)
    assert_same(request, stepped(settings, prompts))


FORBIDDEN = {
    "item": "x.sum().item()",
    "bool": "bool((x > 0).all())",
    "tolist": "x.tolist()",
    "numpy": "x.numpy()",
    "nonzero": "x.nonzero()",
    "tensor": "torch.tensor([1, 2])",
    "zeros": "torch.zeros(2)",
    "sum": "x + 1",
    "cat": "torch.cat([x, x])",
    "index": "x[torch.tensor([0])]",
    "copy": "x.copy_(y)",
    "contiguous": "x[:, None].expand(2, 2).contiguous()",
}
ALLOWED = ["x.add_(1)", "x[None]", "x.view(1, 2)", "x.index_copy_(0, at, y[:1])"]


def as_ours(expression: str) -> Callable[..., object]:
    """A function of ``x, y, at`` that seems to stand in the package."""
    code = f"import torch\ndef f(x, y, at):\n    return {expression}\n"
    namespace: dict[str, Callable[..., object]] = {}
    exec(compile(code, str(Path(lighttransfer.__file__).parent / "layers.py"), "exec"), namespace)
    return namespace["f"]


@pytest.mark.parametrize("name", FORBIDDEN)
def test_the_mode_sees(name: str) -> None:
    with pytest.raises(Forbidden), no_host():
        as_ours(FORBIDDEN[name])(torch.ones(2), torch.ones(2), torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("expression", ALLOWED)
def test_the_mode_allows(expression: str) -> None:
    function, x, y, at = as_ours(expression), torch.ones(2), torch.ones(2), torch.zeros(1, dtype=torch.int64)
    with no_host():
        function(x, y, at)
        torch.cat([x, x])  # not ours


def pages(tokens: int) -> int:
    return -(-tokens // PAGE)


def test_reserve_maps_exactly_and_gives_back() -> None:
    request = Request({"full_layers": 2}, LONG)
    cache = request.cache
    pool = cache.attention_layers[0].pool
    rings = 3 * len(LENGTHS) * pages(WINDOW_SIZE)

    def held(ahead: int) -> int:
        return rings + 2 * sum(pages(length + ahead) for length in LENGTHS)

    assert pool.n_used == held(0)
    for ahead in (30, 5, 0, 17):
        cache.reserve(ahead)
        assert pool.n_used == held(ahead)
        assert cache.report().bytes_in_use == held(ahead) * pool.page_bytes
    request.take(request.forward())
    assert pool.n_used == held(17), "the token came into a page that was reserved"
    cache.crop(0)
    request = Request({"full_layers": 1.0}, LONG)
    request.cache.reserve(17)
    request.cache.crop(-1)
    assert request.cache.attention_layers[0].pool.n_used == 5 * sum(pages(length - 1) for length in LENGTHS)


def test_a_choice_leaves_what_is_reserved_in_full_layers() -> None:
    """Rows that choose while others have long chosen: their cuts must not take the others' pages."""
    request = Request({"full_layers": 2}, [LONG[0], SHORT[1]])
    request.cache.reserve(N_STEPS)
    for _ in range(N_STEPS):
        with request.cache.decode_step():
            logits = request.forward()
        request.take(logits)
    assert all(report.is_decided for report in request.cache.report().requests)
    full = [layer for layer in request.cache.attention_layers if 0 in layer.recent]
    for layer in full:
        for row, recent in enumerate(layer.recent):
            if recent == 0:
                assert layer.blocks.n_slots(row) >= request.cache.lengths[row]
    request.cache.reserve(0)
    assert_same(request, stepped({"full_layers": 2}, [LONG[0], SHORT[1]]))


def test_what_is_reserved_moves_with_its_row() -> None:
    request = Request({"full_layers": 2}, LONG)
    request.cache.reserve(N_STEPS)
    rows = [2, 0, 1]
    request.cache.batch_select_indices(torch.tensor(rows))
    request.token, request.position = request.token[rows].clone(), request.position[rows].clone()
    request.take(request.forward())
    for layer in request.cache.attention_layers:
        for row, recent in enumerate(layer.recent):
            kept = WINDOW_SIZE if recent else LENGTHS[rows[row]] + N_STEPS
            assert layer.blocks.n_slots(row) == PAGE * pages(kept)


def test_tensors_stay_through_a_choice_and_a_reorder() -> None:
    """A captured step goes on after the host has cut layers or moved rows."""
    request = Request({"full_layers": 2}, SHORT)
    cache = request.cache
    cache.reserve(N_STEPS)

    def addresses() -> list[int]:
        tensors = [t for layer in cache.attention_layers for t in (layer.blocks.tensor, layer.n_recent)]
        return [t.data_ptr() for t in (*tensors, cache.attention_layers[0].clock.seq_len)]

    before = addresses()
    for _ in range(N_STEPS):
        request.take(request.forward())
    assert all(report.streaming_layers for report in cache.report().requests)
    assert addresses() == before
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.crop(0)
    assert addresses() == before


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


def test_rows_that_share_pages_write_to_their_own() -> None:
    answers = []
    rows = [1, 1, 0]
    for shared, reserve in ((False, 0), (True, 0), (True, N_STEPS)):
        request = Request({"full_layers": 2}, LONG if shared else [LONG[row] for row in rows])
        if shared:
            request.cache.reorder_cache(torch.tensor(rows))
            request.token, request.position = request.token[rows].clone(), request.position[rows].clone()
        request.token[1] = 40  # two copies of a row that go their own ways
        request.cache.reserve(reserve)
        for _ in range(N_STEPS):
            with request.cache.decode_step():
                logits = request.forward()
            request.take(logits)
        answers.append([row[1:] for row in request.answer()])
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][0] != answers[0][1]


def test_what_cannot_be_a_step_is_refused() -> None:
    request = Request({"full_layers": 2}, LONG)
    cache = request.cache
    empty = LightTransferCache(request.model.config)
    for call in (empty.decode_step().__enter__, lambda: empty.reserve(3)):
        with pytest.raises(RuntimeError, match="has read its prompt"):
            call()
    with pytest.raises(ValueError, match="n_tokens must be at least 0, got -1"):
        cache.reserve(-1)
    with pytest.raises(TypeError, match="n_tokens must be an int"):
        cache.reserve(2.0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="must bring one token per row, got 2"), cache.decode_step():
        request.model(input_ids=torch.ones(3, 2, dtype=torch.int64), cache=cache)
    request = Request({"full_layers": 2}, LONG)
    with request.cache.decode_step(), pytest.raises(RuntimeError, match="inside decode_step"):
        request.cache.reserve(1)
    request = Request({"full_layers": 2}, LONG)
    request.cache.activate_past_recording()
    with pytest.raises(RuntimeError, match="recorded"):
        request.cache.reserve(1)
    request = Request({"full_layers": 2}, LONG)
    request.cache.begin_prefill(4)
    with pytest.raises(RuntimeError, match="has read its prompt"), request.cache.decode_step():
        pass
