"""The command ``lighttransfer``: what it prints, what it measures, and what it says about wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import tiny_tokenizer
from rich.console import Console

from lighttransfer import cli
from lighttransfer.cache import CacheReport, RequestReport
from lighttransfer.cli import models, render
from lighttransfer.cli.measure import FULL_CACHE, Measured, Variant, measure

N_LAYERS = 5
#: H_kv, D and bytes of a number of tiny_models.llama().
TOKEN_BYTES = 2 * 2 * 16 * 4
PAGE = 64
WINDOW = ["--n-sink", "4", "--n-recent", "60", "--n-last", "8"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a tokenizer, saved as a directory."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer.build()
    config = tiny_models.llama(vocab_size=len(tokenizer), max_position_embeddings=2048)
    tiny_models.build(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompt") / "prompt.txt"
    path.write_text(" ".join(f"word{n % 37}" for n in range(150)))
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: Any) -> tuple[int, str, str]:
    status = cli.main([str(arg) for arg in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def pages(tokens: int) -> int:
    return -(-tokens // PAGE)


def test_generate_compares_the_full_cache_with_each_policy(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, prompt_file: Path
) -> None:
    common = ["generate", "--model", checkpoint, "--prompt-file", prompt_file, "--new-tokens", 6, "--device", "cpu"]
    status, out, _ = run(
        capsys, *common, "--dtype", "float32", *WINDOW, "--full-layers", 2, "--policy", "lazy_ratio", "--policy",
        "static:1,3", "--policy", "last", "--json",
    )  # fmt: skip
    assert status == 0
    result = json.loads(out)
    full, lazy, static, last = result["runs"]
    assert [row["name"] for row in result["runs"]] == ["full cache", "lazy_ratio", "static:1,3", "last"]
    length = full["prompt_tokens"] + full["new_tokens"] - 1  # the last token is never fed back
    assert full["kv_bytes"] == N_LAYERS * length * TOKEN_BYTES
    assert full["report"] is None
    for row in (lazy, static, last):
        held = 2 * pages(length) + 3 * pages(64)
        assert row["kv_bytes"] == held * PAGE * TOKEN_BYTES
        assert row["kv_bytes"] <= row["kv_peak_bytes"] < full["kv_peak_bytes"]
        assert len(row["prefill_bytes"]) == N_LAYERS
        assert len(row["decode_bytes"]) == row["new_tokens"] - 1
        assert row["decode_bytes"][-1] == row["kv_bytes"]
        assert row["prefill_speed"] > 0
        assert row["decode_speed"] > 0
    assert static["report"]["requests"][0]["full_layers"] == [1, 3]
    assert last["report"]["requests"][0]["full_layers"] == [3, 4]
    assert len(lazy["report"]["requests"][0]["scores"]) == N_LAYERS
    assert result["machine"]["cores"] >= 1


def test_generate_with_every_layer_full_answers_as_the_full_cache(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, prompt_file: Path
) -> None:
    status, out, _ = run(
        capsys, "generate", "--model", checkpoint, "--prompt-file", prompt_file, "--new-tokens", 12, *WINDOW,
        "--full-layers", 1.0, "--policy", "lazy_ratio", "--dtype", "float32", "--json",
    )  # fmt: skip
    assert status == 0
    full, hybrid = json.loads(out)["runs"]
    assert hybrid["text"] == full["text"] != ""


def test_generate_prints_tables_without_json(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, prompt_file: Path
) -> None:
    status, out, _ = run(
        capsys, "generate", "--model", checkpoint, "--prompt-file", prompt_file, "--new-tokens", 4, *WINDOW
    )
    assert status == 0
    for word in (
        "full cache",
        "lazy_ratio",
        "nonsink_peak",
        "KV now",
        "KV peak",
        "prefill",
        "decode",
        "tok/s",
        "█",
        "░",
    ):
        assert word in out, word


def test_a_prompt_inside_the_window_says_that_nothing_is_decided(
    capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    status, out, _ = run(
        capsys,
        "generate",
        "--model",
        checkpoint,
        "--prompt",
        "A short one.",
        "--new-tokens",
        4,
        "--policy",
        "lazy_ratio",
    )
    assert status == 0
    assert "every layer is still full" in out


def test_inspect_draws_a_picture(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, prompt_file: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "layers.png"
    status, out, _ = run(
        capsys, "inspect", "--model", checkpoint, "--prompts", 3, "--prompt-tokens", 400, "--new-tokens", 4, *WINDOW,
        "--plot", picture,
    )  # fmt: skip
    assert status == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert out.count("█") >= 6 * 3  # two policies, three prompts, three full layers and the legend
    status, out, _ = run(
        capsys, "inspect", "--model", checkpoint, "--prompt-file", prompt_file, "--new-tokens", 3, *WINDOW, "--json"
    )
    assert status == 0
    assert {name: len(rows) for name, rows in json.loads(out)["policies"].items()} == {
        "lazy_ratio": 1,
        "nonsink_peak": 1,
    }


@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        (["generate", "--prompt", "x", "--model", "no/such/place/at/all"], 1, ["no/such/place/at/all", "smollm2"]),
        (["generate", "--prompt", "x", "--model", "missing.gguf"], 1, ["missing.gguf", "does not exist"]),
        (["generate", "--prompt-file", "missing.txt"], 2, ["missing.txt", "No such file"]),
        (["generate", "--prompt", "x", "--policy", "static:a"], 2, ["--policy static", "static:a"]),
        (["generate", "--prompt", "x", "--policy", "first:1"], 2, ["--policy first", "first:1"]),
        (["generate", "--prompt", "x", "--device", "toaster"], 2, ["--device", "toaster"]),
        (["inspect", "--plot", "picture.bmp"], 2, ["--plot", ".png", "picture.bmp"]),
        (["inspect", "--plot", "no_such_folder/picture.png"], 2, ["--plot", "folder does not exist"]),
    ],
)
def test_wrong_arguments_get_a_sentence(
    capsys: pytest.CaptureFixture[str], argv: list[str], status: int, says: list[str]
) -> None:
    got, out, err = run(capsys, *argv)
    assert got == status
    assert out == ""
    for words in says:
        assert words in err.replace("\n", " ")
    assert "Traceback" not in err


def test_help_and_the_parser_name_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, status, says in (
        (["--help"], 0, ["demo", "generate", "inspect"]),
        (
            ["generate", "--help"],
            0,
            ["--prompt-file", "--full-layers", "--policy", "--n-sink", "--json", "nonsink_peak"],
        ),
        (["generate"], 2, ["--prompt-file"]),
        (["demo", "--full-layers", "half"], 2, ["a count such as 15 or a share such as 0.5, got 'half'"]),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(argv)
        assert stop.value.code == status
        captured = capsys.readouterr()
        assert all(words in captured.out + captured.err for words in says)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--policy", "laziest"], "laziest: policy must be one of"),
        (["--full-layers", "6"], "full_layers must be at most the model's 5"),
        (["--n-recent", "0"], "n_recent"),
        (["--new-tokens", "1"], "--new-tokens must be at least 2"),
        (["--new-tokens", "3000"], "exceed the model's context of 2048"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_named(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, argv: list[str], says: str
) -> None:
    status, _, err = run(capsys, "generate", "--model", checkpoint, "--prompt", "A prompt.", "--no-baseline", *argv)
    assert status == 2
    assert says in err


def test_measure_leaves_the_model_as_it_was(checkpoint: Path) -> None:
    model, tokenizer = models.load_model(checkpoint)
    before = model.config._attn_implementation, model.generation_config.to_dict()
    ids = tokenizer("the island " * 60).input_ids
    told: list[tuple[int, int]] = []
    variant = Variant("half", {"n_sink": 4, "n_recent": 28, "full_layers": 2})
    for each in (FULL_CACHE, variant):
        run = measure(
            model, tokenizer, ids, each, new_tokens=5, stop_at_eos=False, progress=lambda *at: told.append(at)
        )
        assert run.new_tokens == 5
        assert len(run.step_seconds) == 4
    assert told == 2 * [(step, N_LAYERS + 5) for step in range(1, N_LAYERS + 6)]
    assert (model.config._attn_implementation, model.generation_config.to_dict()) == before
    assert not any(module._forward_hooks for module in model.modules())


def fake_run() -> Measured:
    request = RequestReport(
        length=40, is_decided=True, full_layers=[1, 2], streaming_layers=[3], scores={1: 0.25, 2: 0.5, 3: 0.75},
        bytes_held=10, peak_bytes=20, bytes_full=30, bytes_freed=20,
    )  # fmt: skip
    report = CacheReport(
        policy="lazy_ratio", n_sink=4, n_recent=8, n_last=4, n_layers=4, competing_layers=[1, 2, 3], requests=[request],
        bytes_in_use=10, peak_bytes=20, storage_bytes=40, peak_storage_bytes=40,
    )  # fmt: skip
    return Measured("lazy_ratio", "an answer", 30, 3, 0.5, [0.1, 0.3], 10_000_000, 20_000_000, report=report)


def test_tables_show_layers_scores_and_ratios() -> None:
    full = Measured("full cache", "another", 30, 3, 1.0, [0.2, 0.4], 40_000_000, 40_000_000)
    assert render.layer_map(fake_run().report, 4).plain == "·██░"
    assert render.layer_map(fake_run().report, 4, width=3).plain == "·█\n█░"
    console = Console(width=120, record=True, file=None, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(render.side_by_side([full, fake_run()], 4, [False, True], 120))
        console.print(render.score_table([full, fake_run()]))
    out = capture.get()
    for text in ("10.0 MB (25%)", "20.0 MB (50%)", "60.0 tok/s (x2.00)", "5.0 tok/s (x1.50)", "0.7500", "0.2500 █"):
        assert text in out, out
    assert render.score_table([full]) is None
