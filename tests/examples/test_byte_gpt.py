"""examples/byte_gpt.py: its flags and text, and small trainings as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.examples.scripts import FOLDER, check_refused, load, options_of, run
from tests.rounding import assert_close
from tilework.dtensor import DTensor, init_device_mesh, strict
from tilework.testing import run_ranks

SCRIPT = FOLDER / "byte_gpt.py"
SMALL = ["--steps", "4", "--batch", "7", "--context", "16", "--width", "32", "--layers", "1"]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load(SCRIPT)


@pytest.fixture
def options(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Any:  # a function of flags, which gives the example's Options
    return options_of(example, monkeypatch)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("tiles are owned by ranks; " * 40)
    return str(path)


# -- flags -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--steps 0", "argument --steps: expected a whole number of at least 1, got '0'"),
        ("--steps many", "argument --steps: expected a whole number of at least 1, got 'many'"),
        ("--ranks -2", "argument --ranks: expected"),
        ("--seed -1", "argument --seed: expected a whole number of at least 0, got '-1'"),
        ("--batch 1.5", "argument --batch: expected"),
        ("--context 0", "argument --context: expected"),
        ("--layers 0", "argument --layers: expected"),
        ("--width 33", "--width 33 is not a multiple of 32"),
        ("--batch 2 --ranks 3", "--batch 2 is less than one sequence for each of 3 ranks"),
        ("--dp 2 --tp 2 --ranks 5", "--dp 2 times --tp 2 is not the number of ranks, 5"),
        ("--tp 0", "argument --tp: expected a whole number of at least 1, got '0'"),
        ("--tp 3 --width 64", "--tp 3 is more than the 2 attention heads"),
        ("--stepz 3", "unrecognized arguments: --stepz 3"),
        ("--parallel xp", "expected ddp, fsdp, tp, pp, or several like ddp,tp, got 'xp'"),
        ("--parallel ddp,", "expected ddp, fsdp, tp, pp, or several like ddp,tp, got 'ddp,'"),
        ("--parallel pp --pp 3", "--pp 3 needs as many --layers, and"),
        ("--parallel pp,ddp --ranks 5", "--pp 2 times --dp 2 times --tp 1 is not the number"),
        ("--parallel pp --dp 2", "--dp 2 shares the batch: --parallel pp,ddp or pp,fsdp does"),
        ("--pp 2", "--pp 2 cuts the model into stages: --parallel pp,ddp does that"),
        ("--parallel tp,tp", "'tp,tp' names one twice"),
        ("--parallel ddp,fsdp", "'ddp,fsdp': ddp and fsdp both share the batch; take ddp where"),
        ("--parallel fsdp --tp 2", "--tp 2 shares the model, but --parallel fsdp does not"),
        ("--parallel ddp --dp 2 --ranks 4", "--dp 2 times --tp 1 is not the number of ranks, 4"),
        ("--parallel fsdp --hook bf16", "--hook bf16 is for ddp, which averages gradients, but"),
        ("--hook fast", "argument --hook: invalid choice: 'fast'"),
    ],
)
def test_a_wrong_flag_gets_one_clear_error(
    options: Any, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    check_refused(options, capsys, flags, message)


def test_the_launcher_decides_the_number_of_ranks(
    options: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert options().ranks == 3
    with pytest.raises(SystemExit):
        options("--ranks", "2")
    assert "--ranks 2, but the launcher started 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "mesh"),
    [
        ("--ranks 4", ("ddp,tp", 2, 2)),
        ("--ranks 3", ("ddp", 3, 1)),
        ("--ranks 1", ("ddp", 1, 1)),
        ("--ranks 4 --width 32", ("ddp", 4, 1)),
        ("--dp 2 --tp 2", ("ddp,tp", 2, 2)),
        ("--tp 3", ("tp", 1, 3)),
        ("--dp 3", ("ddp", 3, 1)),
        ("--ranks 6 --dp 3", ("ddp,tp", 3, 2)),
        ("--ranks 6 --tp 3", ("ddp,tp", 2, 3)),
        ("--parallel ddp --ranks 4", ("ddp", 4, 1)),
        ("--parallel fsdp --ranks 3", ("fsdp", 3, 1)),
        ("--parallel fsdp --dp 3", ("fsdp", 3, 1)),
        ("--parallel tp --ranks 4", ("tp", 1, 4)),
        ("--parallel tp --ranks 6", ("tp", 2, 3)),
        ("--parallel tp --dp 2 --tp 2", ("tp", 2, 2)),
        ("--parallel fsdp,tp --ranks 4", ("fsdp,tp", 2, 2)),
        ("--parallel tp,ddp --ranks 6", ("tp,ddp", 3, 2)),
        ("--parallel ddp,tp --ranks 2", ("ddp,tp", 1, 2)),
        ("--parallel ddp,tp --ranks 9", ("ddp,tp", 3, 3)),
        ("--parallel ddp,tp --ranks 5", ("ddp,tp", 5, 1)),
        ("--parallel ddp,tp --tp 3", ("ddp,tp", 2, 3)),
        ("--parallel fsdp,tp --dp 3", ("fsdp,tp", 3, 2)),
    ],
)
def test_the_mesh_follows_from_what_is_said(
    options: Any, flags: str, mesh: tuple[str, int, int]
) -> None:
    found = options(*flags.split())
    assert (",".join(found.parallel), found.dp, found.tp) == mesh
    assert found.ranks == mesh[1] * mesh[2]


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ("--parallel pp", (2, 1, 1)),
        ("--parallel pp,ddp", (2, 2, 1)),
        ("--parallel pp,ddp --ranks 6", (2, 3, 1)),
        ("--parallel pp,fsdp,tp", (2, 2, 2)),
        ("--parallel pp,tp --pp 3 --tp 2 --layers 3", (3, 1, 2)),
    ],
)
def test_stages_take_their_part_of_the_ranks(
    options: Any, flags: str, sizes: tuple[int, int, int]
) -> None:
    found = options(*flags.split())
    assert (found.pp, found.dp, found.tp) == sizes
    assert found.ranks == sizes[0] * sizes[1] * sizes[2]


def test_only_rank_0_tells_of_a_wrong_flag(
    options: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        options("--steps", "0")
    assert capsys.readouterr().err == ""


# -- the text ----------------------------------------------------------------------------------


def test_text_that_is_missing(example: ModuleType, options: Any) -> None:
    with pytest.raises(ValueError, match=r"--text nowhere\.txt: no such file or folder"):
        example.load_text(options("--text", "nowhere.txt"))


def test_text_that_is_empty(example: ModuleType, options: Any, tmp_path: Path) -> None:
    tmp_path.joinpath("empty.txt").write_text(" \n")
    for path in (tmp_path, tmp_path / "empty.txt"):
        with pytest.raises(ValueError, match="there is no text in it"):
            example.load_text(options("--text", str(path)))


def test_text_that_is_too_short(example: ModuleType, options: Any, tmp_path: Path) -> None:
    tmp_path.joinpath("short.txt").write_text("x" * 16)
    with pytest.raises(ValueError, match="16 bytes are too few for --context 16; at least 17"):
        example.load_text(options("--context", "16", "--text", str(tmp_path / "short.txt")))


def test_a_folder_is_read_in_order_without_hidden_files(
    example: ModuleType, options: Any, tmp_path: Path
) -> None:
    tmp_path.joinpath("a").mkdir()
    for name, text in {"b.txt": "second", "a/z.txt": "first", ".hidden": "never"}.items():
        tmp_path.joinpath(name).write_text(text)
    data = example.load_text(options("--context", "4", "--text", str(tmp_path)))
    assert bytes(data.tolist()) == b"first\nsecond"


def test_the_standard_library_is_several_megabytes(example: ModuleType, options: Any) -> None:
    files = example.text_files(None)
    assert sum(path.stat().st_size for path in files) > 3e6
    assert not [path for path in files if "test" in path.parts or "site-packages" in path.parts]


# -- in parallel -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "dp", "tp"),
    [
        *(("tp", 2, 2), ("tp", 1, 3), ("tp", 3, 1), ("ddp", 3, 1), ("fsdp", 3, 1)),
        *(("ddp,tp", 2, 2), ("fsdp,tp", 2, 2), ("fsdp,tp", 1, 3)),
    ],
)
def test_a_step_is_that_of_one_process_and_gathers_nothing(
    example: ModuleType, options: Any, parallel: str, dp: int, tp: int
) -> None:
    """Seven rows, four heads: neither is even on all these meshes."""
    flags = ["--batch", "7", "--context", "6", "--width", "128", "--layers", "2"]
    asked = options("--parallel", parallel, "--dp", str(dp), "--tp", str(tp), *flags)
    batch = torch.randint(256, (7, 7))
    plain = example.build(asked)
    wanted = example.loss_of(plain, batch)
    wanted.backward()
    models = [example.build(asked) for _ in range(dp * tp)]

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        model = example.in_parallel(models[rank], asked, mesh)
        with strict():
            loss = example.loss_on(model, batch, asked, mesh)
            loss.backward()
        assert example.mean_of(loss, asked, mesh) == pytest.approx(wanted.item())
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            grad: Any = mine.grad
            grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
            assert_close(grad, other.grad)

    run_ranks(dp * tp, program)


def test_batches_do_not_depend_on_the_number_of_ranks(example: ModuleType, options: Any) -> None:
    text = torch.arange(200, dtype=torch.uint8)
    few, many = (
        list(example.batches(text, options("--steps", "3", "--ranks", ranks)))
        for ranks in ("1", "4")
    )
    assert all(torch.equal(a, b) for a, b in zip(few, many, strict=True))


# -- as a user runs it ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "ranks", "width"),
    [("ddp", 3, 32), ("ddp,tp", 4, 96), ("fsdp,tp", 4, 64), ("pp,ddp", 4, 32)],
)
def test_ranks_train_as_one_process(text: str, parallel: str, ranks: int, width: int) -> None:
    """Rows or heads are uneven. Without a launcher the script starts its three ranks itself."""
    flags = ["--parallel", parallel, "--ranks", str(ranks), "--width", str(width)]
    launch = ["-m", "tilework.cli", "run", "--prefix", "others", "-n", "4"]
    launch = launch if "tp" in parallel else []
    layers = ["--layers", "2"] if "pp" in parallel else []
    done = run(*launch, str(SCRIPT), "--check", "--text", text, *SMALL, *flags, *layers)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result) == [
        *("parallel", "ranks", "dp", "tp", "pp", "steps", "loss_first", "loss_last"),
        "tokens_per_s",
        *("messages_per_step", "mb_per_step", "max_rel_diff_early", "max_rel_diff"),
    ]
    mesh = {"ddp": [3, 3, 1, 1], "pp,ddp": [4, 2, 1, 2]}.get(parallel, [4, 2, 2, 1])
    assert [result[name] for name in ("ranks", "dp", "tp", "pp", "steps")] == [*mesh, 4]
    assert result["max_rel_diff_early"] <= result["max_rel_diff"] < 1e-4
    assert result["loss_last"] < result["loss_first"]
    assert result["messages_per_step"] > 0
    assert result["mb_per_step"] > 0


@pytest.mark.parametrize("hook", ["bf16", "powersgd"])
def test_hooks_train_nearly_as_one_process(
    example: ModuleType, options: Any, text: str, hook: str
) -> None:
    flags = ["--parallel", "ddp", "--ranks", "2", "--hook", hook, "--text", text]
    asked = options(*flags, *SMALL)
    data = example.load_text(asked)
    alone = example.train_alone(data, asked)
    trained = run_ranks(2, lambda rank: example.train(data, asked))[0]
    assert trained.losses == pytest.approx(alone, rel=0.05)
    assert trained.losses != pytest.approx(alone, rel=1e-6)


def test_under_the_launcher_the_last_line_is_bare_json(text: str) -> None:
    launch = ["-m", "tilework.cli", "run", "--prefix", "others", "-n", "2"]
    done = run(*launch, str(SCRIPT), "--text", text, *SMALL)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["ranks"] == 2
    assert "training 4/4  loss" in done.stdout


def test_a_wrong_text_ends_it_before_any_rank_starts() -> None:
    done = run(str(SCRIPT), "--text", "nowhere.txt")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("--text nowhere.txt: no such file or folder")
    assert done.stderr.count("error") == 1


def test_a_killed_rank_does_not_change_the_losses(text: str) -> None:
    flags = [*SMALL, "--ranks", "3", "--parallel", "fsdp", "--text", text, "--check"]
    done = run(str(SCRIPT), *flags, "--resilient", "--kill", "3")
    results = json.loads(done.stdout.splitlines()[-1])
    assert (results["ranks"], results["dp"], results["steps"]) == (2, 2, 4)
    assert results["max_rel_diff"] < 1e-4


def test_nobody_is_killed_who_is_alone(options: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("--ranks", "2", "--kill", "3")
    assert "--kill kills a rank: it needs --resilient" in capsys.readouterr().err
