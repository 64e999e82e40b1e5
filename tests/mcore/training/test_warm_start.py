# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A plain model that the stock host saved becomes one with a residual, and computes the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_residuals.cli import main
from megatron_residuals.interchange import is_residual_key
from megatron_residuals.mcore.install import install
from megatron_residuals.mcore.training.warm_start import start_from_plain
from megatron_residuals.testing.ranks import RankFailure, run_ranks
from megatron_residuals.testing.residual_toy import keep_residual_init, spec_for
from megatron_residuals.testing.toy_gpt import ToyGPT, build_chunks, setup_parallel, train_step
from megatron_residuals.testing.toy_weights import named_globally

pytestmark = [
    pytest.mark.host,
    # torch warns of how the host calls its checkpoints
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

# one layer in each stage; float64 with a negligible eps shows that eps is all that differs
TINY_EPS, EPS = 1e-30, 1e-5
RESIDUALS = ["attnres()", "block_attnres(block_layers=2)", "mhc(streams=2)", "hc(streams=3)"]


def toy(eps: float = TINY_EPS, **options: Any) -> ToyGPT:
    return ToyGPT(
        num_layers=4,
        pp=2,
        vpp=2,
        dtype=torch.float64,
        config_overrides={"layernorm_epsilon": eps},
        **options,
    )


def chunks_of(model: ToyGPT, residual: str | None, seed: int) -> list[Any]:
    spec = None if residual is None else spec_for(residual)
    other = dataclasses.replace(model, seed=seed)
    return build_chunks(other, spec, initialise=keep_residual_init)


def request(chunks: list[Any]) -> dict[str, Any]:
    return {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}


def load(chunks: list[Any], folder: Path, **options: Any) -> None:
    """As the host's training loop does."""
    state = dist_checkpointing.load(request(chunks), str(folder), **options)
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"model{i}"], strict=True)


def save_plain(folder: Path, model: ToyGPT | None = None) -> list[float]:
    """A stock model saves itself on its ranks; returns its losses."""
    model = model or toy()
    folder.mkdir()

    def save() -> list[float]:
        install()
        setup_parallel(model)
        chunks = chunks_of(model, None, seed=1)
        dist_checkpointing.save(request(chunks), str(folder))
        return train_step(chunks, model)

    return run_ranks(model.pp, save)[-1]


def weights_of(chunks: list[Any]) -> list[tuple[str, torch.nn.Parameter]]:
    return [named for chunk in chunks for named in named_globally(chunk)]


def weights(chunks: list[Any]) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in weights_of(chunks)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A checkpoint of a stock model over two ranks of two stages, and the model's losses."""
    folder = tmp_path_factory.mktemp("plain") / "checkpoint"
    return folder, save_plain(folder)


def test_every_mechanism_starts_from_the_stock_checkpoint_with_its_losses(
    plain: tuple[Path, list[float]], capfd: pytest.CaptureFixture[str]
) -> None:
    folder, losses = plain

    def start() -> list[list[float]]:
        setup_parallel(toy())
        found = []
        for residual in RESIDUALS:
            chunks = chunks_of(toy(), residual, seed=2)
            before = weights(chunks)
            with start_from_plain():
                load(chunks, folder)
            after = weights(chunks)
            for name, weight in after.items():
                is_kept = torch.equal(weight, before[name])
                assert is_kept == is_residual_key(name), name
            found.append(train_step(chunks, toy()))
        return found

    *_, found = run_ranks(2, start)
    assert len(losses) == 4
    for residual, own in zip(RESIDUALS, found, strict=True):
        torch.testing.assert_close(own, losses, rtol=1e-12, atol=0, msg=residual)
    out = capfd.readouterr().out
    assert out.count(f"megatron_residuals: starts from the plain model in {folder}: ") == 4, out


def give_memory(chunks: list[Any]) -> None:
    """As the host's training loop does to a model that was born on the meta device."""
    for chunk in chunks:
        chunk._apply(
            lambda t: torch.empty_like(t, device="cpu") if t.is_meta else t.to(torch.device("cpu"))
        )


@pytest.mark.parametrize("use_cpu_initialization", [True, False])
def test_a_model_born_on_the_meta_device_starts_with_the_same_losses(
    plain: tuple[Path, list[float]], use_cpu_initialization: bool
) -> None:
    """With --init-model-with-meta-device and --use-cpu-initialization the residual's parameters
    "kept" what lay in their memory, up to 1e23, and the first step was NaN."""
    folder, losses = plain
    options = {"init_model_with_meta_device": True}
    options["use_cpu_initialization"] = use_cpu_initialization
    model = toy()
    model = dataclasses.replace(model, config_overrides={**model.config_overrides, **options})

    def start() -> list[list[float]]:
        setup_parallel(model)
        torch.use_deterministic_algorithms(True)  # new memory is full of NaN
        found = []
        for residual in RESIDUALS:
            with torch.device("meta"):
                chunks = build_chunks(model, spec_for(residual), initialise=lambda *_: None)
            new = [p for n, p in weights_of(chunks) if is_residual_key(n)]
            assert new and all(parameter.is_meta for parameter in new)
            give_memory(chunks)
            with start_from_plain():
                load(chunks, folder)
            found.append(train_step(chunks, model))
        return found

    *_, found = run_ranks(2, start)
    for residual, own in zip(RESIDUALS, found, strict=True):
        torch.testing.assert_close(own, losses, rtol=1e-12, atol=0, msg=residual)


def test_a_converted_checkpoint_loads_as_one_of_the_residual_with_the_losses_of_the_plain_one(
    plain: tuple[Path, list[float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, losses = plain
    words = ["convert", str(folder), str(tmp_path / "converted")]
    assert main([*words, "--residual", "mhc", "--residual-streams", "2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "decoder.layers.mlp_residual.mapping_weight [4, 8, 64] float32 0 " in printed

    def start() -> list[float]:
        setup_parallel(toy())
        spec = spec_for("mhc(streams=2)")
        chunks = build_chunks(toy(), spec)  # every parameter random
        load(chunks, tmp_path / "converted")
        return train_step(chunks, toy())

    torch.testing.assert_close(run_ranks(2, start)[-1], losses, rtol=1e-12, atol=0)


def test_the_loss_differs_by_the_eps_of_the_hosts_norms_alone(
    plain: tuple[Path, list[float]],
) -> None:
    """A read of m sources is the plain stream / m, so a norm sees its eps m^2 times as large."""
    folder, _ = plain

    def differences() -> list[float]:
        setup_parallel(toy())
        found = []
        for eps in (EPS, EPS / 100):
            losses = []
            for residual in (None, "attnres()"):
                chunks = chunks_of(toy(eps), residual, seed=3)
                with start_from_plain():
                    load(chunks, folder)
                losses.append(train_step(chunks, toy(eps)))
            if losses[0]:
                found.append(max(abs(a - b) for a, b in zip(*losses, strict=True)))
        return found

    *_, (large, small) = run_ranks(2, differences)
    assert 1e-7 < large < 1e-2
    assert large / small == pytest.approx(100, rel=0.05)  # linear in eps, so nothing else is there


@pytest.mark.parametrize("num_sources", [2, 8, 64])
@pytest.mark.parametrize("variance", [1.0, 4e-4])
def test_a_norm_of_a_mean_of_sources_keeps_to_the_stated_bound(
    num_sources: int, variance: float
) -> None:
    """|norm(x / m) - norm(x)| <= eps (m^2 - 1) / (2 var x) |norm(x)|."""
    x = torch.randn(50, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x *= variance**0.5

    def norm(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(values, x.shape[-1:], eps=EPS)

    error = ((norm(x / num_sources) - norm(x)).abs() / norm(x).abs()).amax(-1)
    bound = EPS * (num_sources**2 - 1) / (2 * x.var(-1, correction=0))
    assert (error <= bound).all()
    if bound.max() < 0.1:  # and it is no loose one
        assert (error > 0.8 * bound).all()


def test_a_plain_state_dict_lacks_the_new_keys_alone_and_loads_when_that_is_meant() -> None:
    def check() -> None:
        one = dataclasses.replace(toy(), pp=1, vpp=None)
        setup_parallel(one)
        (stock,) = chunks_of(one, None, seed=1)
        state = stock.state_dict()
        for residual in RESIDUALS:
            (model,) = chunks_of(one, residual, seed=2)
            initial = weights([model])
            new = [name for name in initial if is_residual_key(name)]
            missing, unexpected = model.load_state_dict(state, strict=False)
            assert sorted(missing) == sorted(new) and unexpected == []
            with pytest.raises(RuntimeError, match="Missing key"):
                model.load_state_dict(state)
            (model,) = chunks_of(one, residual, seed=2)
            with start_from_plain():
                model.load_state_dict(state)
            own = weights([model])
            assert all(torch.equal(own[name], initial[name]) for name in new)
            assert all(torch.equal(own[n], w) for n, w in weights([stock]).items())
            with torch.device("meta"):
                (model,) = chunks_of(one, residual, seed=2)
            with start_from_plain():
                model.load_state_dict(state, assign=True)
            own = weights([model])  # the values were announced, and the parameters had none
            for name in new:  # here they are initialised in float64, not cast to it
                torch.testing.assert_close(own[name], initial[name], rtol=1e-6, atol=0)
            incomplete = {k: v for k, v in state.items() if "1.mlp.linear_fc2.weight" not in k}
            with start_from_plain(), pytest.raises(ValueError, match="1.mlp.linear_fc2.weight"):
                model.load_state_dict(incomplete, strict=False)

    run_ranks(1, check)


def test_without_consent_a_plain_checkpoint_is_refused_with_the_flag_to_give(
    plain: tuple[Path, list[float]],
) -> None:
    def start() -> None:
        setup_parallel(toy())
        load(chunks_of(toy(), "mhc(streams=2)", seed=2), plain[0])

    with pytest.raises(RankFailure, match="without a residual mechanism.*give --finetune"):
        run_ranks(2, start)


def test_keys_of_the_host_that_the_checkpoint_lacks_are_named(tmp_path: Path) -> None:
    small = dataclasses.replace(toy(bias=False), pp=1, vpp=None)
    save_plain(tmp_path / "small", small)

    def start() -> None:
        model = dataclasses.replace(small, bias=True)
        setup_parallel(model)
        chunks = chunks_of(model, "block_attnres()", seed=2)
        with start_from_plain():
            with pytest.raises(ValueError) as caught:
                load(chunks, tmp_path / "small")
            assert "decoder.layers.mlp.linear_fc1.bias" in str(caught.value)
            assert "residual." not in str(caught.value)
            # who asks the host to go on without keys is not stopped by us
            dist_checkpointing.load(
                request(chunks), str(tmp_path / "small"), strict="log_unexpected"
            )

    run_ranks(1, start)


@pytest.mark.parametrize("optimizer", ["optimizer", "chained_0.optimizer"])
def test_the_state_of_an_optimizer_cannot_come_from_a_plain_checkpoint(
    plain: tuple[Path, list[float]], optimizer: str
) -> None:
    def start() -> None:
        setup_parallel(toy())
        wanted = request(chunks_of(toy(), "attnres()", seed=2))
        entries = [e for model in wanted.values() for e in model.values()]
        wanted["optimizer"] = [
            dataclasses.replace(entry, key=f"{optimizer}.state.exp_avg.{entry.key}")
            for entry in entries
            if isinstance(entry, ShardedTensor)
        ]
        with start_from_plain(), pytest.raises(ValueError, match="load the model without the opt"):
            dist_checkpointing.load(wanted, str(plain[0]))
        assert parallel_state.model_parallel_is_initialized()

    run_ranks(2, start)


def test_a_checkpoint_with_the_residual_is_read_whole_also_when_a_plain_one_is_allowed(
    tmp_path: Path,
) -> None:
    one = dataclasses.replace(toy(), pp=1, vpp=None)
    (tmp_path / "saved").mkdir()

    def start() -> None:
        setup_parallel(one)
        spec = spec_for("block_attnres()")
        chunks = build_chunks(one, spec)  # every parameter random
        dist_checkpointing.save(request(chunks), str(tmp_path / "saved"))
        others = chunks_of(one, "block_attnres()", seed=2)
        with start_from_plain():
            load(others, tmp_path / "saved")
        saved, loaded = weights(chunks), weights(others)
        assert all(torch.equal(loaded[name], weight) for name, weight in saved.items())
        assert any(is_residual_key(name) and weight.any() for name, weight in loaded.items())

    run_ranks(1, start)
