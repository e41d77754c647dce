"""A smoke run of every method and control on toy tasks, resumption to the same bits, gradient cosines on request."""

import pytest
import torch
import toy_env
from method_batches import NAMES, SCHEDULED, TINY, smoke_run, start_folder

from eppo.algorithms import ALGORITHMS
from eppo.algorithms.eppo import EPPO
from eppo.config import load_recipe
from eppo.trainer import train

LOGGED = {"dcpo": ["dcpo/visits_mean", "dcpo/lo_half_frac"], "dcpo_native": ["dcpo/hi_max_frac"],
          "bapo": ["bapo/lo", "bapo/search_steps"],
          "bapo_native": ["bapo/share"], "dapo": ["sampling/used_frac", "sampling/toy_coin/generated"],
          "gigpo": ["gigpo/singleton_frac"],
          "gigpo_seal": ["gigpo/anchor_group_size", "seal/accuracy", "loss/seal"], "seal": ["seal/accuracy", "loss/seal"],
          "entropy_bonus": ["entropy_bonus/coef", "loss/entropy"], "epo": ["epo/outside_frac", "loss/smoothing"],
          "epo_hinge": ["loss/smoothing"], "clip_cov": ["clip_cov/picked_frac", "cov/max"], "kl_cov": ["kl_cov/abs_log_ratio"],
          "pcgrad": ["gradient/conflict_frac", "gradient/update_ratio"],
          "cagrad": ["gradient/toy_coin/weight", "gradient/toy_coin/toy_dice/cosine"],
          "rloo": ["rloo/baseline_std", "rloo/adv_abs"], "rloo_eppo": ["rloo/adv_abs"], "rloo_sequence": ["rloo/kl", "rloo/adv_abs"],
          "c6_success": ["control/toy_coin/signal"], "c7_reward_spread": ["control/toy_dice/signal"],
          "c11_weights": ["control/toy_coin/weight"], "c0_fixed": ["control/eps_mean_all", "control/eppo_eps_mean_all"],
          "grpo": ["pacer/toy_coin/eps"], "agentrl": ["task/toy_coin/reinforced_failure_frac"]}
BOUNDS = {"grpo": (.8, 1.2), "agentrl": (.8, 1.2), "dr_grpo": (.8, 1.2), "rloo": (.8, 1.2), "dapo": (.8, 1.28),
          "ce_gppo": (.8, 1.2),
          "gspo": (.9997, 1.0004), "cispo": (0, 5), "gigpo": (.8, 1.2), "seal": (.8, 1.2), "pcgrad": (.8, 1.2),
          "cagrad": (.8, 1.2),
          "entropy_bonus": (.8, 1.2), "epo": (.8, 1.2), "epo_hinge": (.8, 1.2), "rloo_sequence": (.8, 1.2), "gigpo_seal": (.8, 1.2),
          "c0_fixed": (.8, 1.2), "c11_weights": (.8, 1.2)}


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    return start_folder(tmp_path_factory)


@pytest.fixture(scope="session")
def schedule(start, tmp_path_factory):
    """A finished run of eppo with another seed, for the arms that replay one."""
    return str(smoke_run(start, tmp_path_factory.mktemp("source") / "run", "eppo", seed=7).path)


@pytest.mark.parametrize("name", NAMES)
def test_smoke_run(start, schedule, tmp_path, name):
    run = smoke_run(start, tmp_path / "run", name, **{"schedule_from": schedule} if name in SCHEDULED else {})
    assert run.info["status"] == "finished" and len(run.episodes) == 30
    rows = run.steps[run.steps["step"] > 0]
    assert len(rows) == 3 and (rows["loss/grad_norm"] >= 0).all() and rows["loss/grad_norm"].max() > 0
    numbers = rows[[key for key in rows if key.startswith(("loss/", "pacer/", "control/", "gradient/"))]]
    assert numbers.notna().all(axis=None), [key for key in numbers if numbers[key].isna().any()]
    assert all(key in rows for key in LOGGED.get(name, [])), [key for key in LOGGED.get(name, []) if key not in rows]
    if name in BOUNDS:
        for side, bound in zip(("lo", "hi"), BOUNDS[name]):
            assert rows[f"task/toy_coin/{side}"].tolist() == pytest.approx([bound] * 3, abs=1e-6)
    if name in ("sapo", "kl_cov"):
        assert rows["task/toy_coin/hi"].isna().all()
    if name.startswith("dcpo"):
        assert (rows["task/toy_coin/lo"] < 0.8).all() and (rows["task/toy_coin/hi"] > 1.17).all()
    if name.startswith("bapo"):
        for side in ("lo", "hi"):
            assert rows[f"task/toy_coin/{side}"].tolist() == pytest.approx(rows[f"bapo/{side}"].tolist(), abs=1e-6)
    if name == "clip_cov":                                  # the chosen tokens are marked by an empty range
        assert (rows["task/toy_coin/hi"] <= 1.2 + 1e-6).all()
    if issubclass(ALGORITHMS[name], EPPO) and not name.startswith("c"):
        assert rows["task/toy_coin/hi"].tolist() == pytest.approx((1 + rows["pacer/toy_coin/eps"]).tolist(), abs=1e-6)
    if name.startswith("c") and name[1].isdigit():
        assert rows["task/toy_coin/hi"].tolist() == pytest.approx((1 + rows["control/toy_coin/eps"]).tolist(), abs=1e-6)
    from safetensors.torch import load_file

    before, after = (load_file(folder / "model.safetensors") for folder in (start, tmp_path / "run" / "model"))
    assert all(torch.isfinite(value).all() for value in after.values())
    assert any(not torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", ["seal", "dcpo", "bapo", "epo", "clip_cov", "entropy_bonus", "c3_random", "c7_reward_spread",
                                  "c9_clip_equaliser", "pcgrad"])
def test_a_stopped_run_resumes_to_the_same_bits(start, tmp_path, name):
    from eppo.records import compare_steps

    smoke_run(start, tmp_path / "whole", name)
    config = load_recipe("micro", method=name, tasks=list(toy_env.GAMBLES), seed=0, out=str(tmp_path / "cut"),
                         **{"model.path": str(start), **TINY})
    running = train(config)
    for record in running:
        if record.step == 2:
            break
    running.close()
    list(train(config, resume=True))
    assert compare_steps(tmp_path / "whole", tmp_path / "cut") == []


def test_gradient_cosines_are_recorded_on_request(start, tmp_path):
    run = smoke_run(start, tmp_path / "run", "eppo", gradient_cosines=True)
    cosines = run.steps["gradient/toy_coin/toy_dice/cosine"].dropna()
    assert len(cosines) > 0 and cosines.abs().max() <= 1 + 1e-6
    plain = smoke_run(start, tmp_path / "plain", "eppo")
    assert not [name for name in plain.steps if name.startswith("gradient/")]
    assert run.steps["loss/grad_norm"].dropna().tolist() == pytest.approx(plain.steps["loss/grad_norm"].dropna().tolist(),
                                                                          rel=1e-3)
