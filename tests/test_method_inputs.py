"""What methods refuse and what they warn of: contradictions, two pacers, runs that do not fit; and where the pacer's input comes from."""

import ast
import math
from pathlib import Path

import pytest
from method_batches import MODEL, NAMES, STEPS, TASKS, begun, make_batch, smoke_run, start_folder, stats

from eppo.algorithms import ALGORITHMS, EPPO, ClipCov, get_algorithm, register
from eppo.algorithms.bapo import BAPO
from eppo.algorithms.c6_success import SuccessPacing
from eppo.algorithms.c9_clip_equaliser import ClipEqualiser
from eppo.algorithms.entropy_bonus import EntropyBonus
from eppo.controls import read_references, read_schedule
from eppo.pacer import EntropyPacer

FOLDER = Path(__file__).resolve().parent.parent / "eppo" / "algorithms"
PARTS = ("__init__", "base", "paced", "arms")               # shared by methods, none themselves


# ---- one small file per method, whose docstring says what and where from --------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_a_method_is_one_small_file_that_names_its_source(name):
    path = FOLDER / f"{name}.py"
    text, tree = path.read_text(), ast.parse(path.read_text())
    lines = {number for node in ast.walk(tree) if isinstance(node, ast.stmt) and not _is_docstring(node)
             for number in range(node.lineno, node.end_lineno + 1) if not isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    assert len(text.splitlines()) <= 100 and len(lines) <= 60, (len(text.splitlines()), len(lines))
    source = ALGORITHMS[name].__doc__.partition("Source:")[2].partition("Differs from")[0]
    if name[0] == "c" and name[1].isdigit():
        assert "control of this suite" in source
    else:
        assert "arXiv 2" in source and any(word in source for word in ("section", "eq. ", "algorithm 1", "Table", "code", "in TRL")), source


def _is_docstring(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_the_files_are_the_methods():
    assert {path.stem for path in FOLDER.glob("*.py")} == {*ALGORITHMS, *PARTS}


def test_trainer_and_learner_know_no_method_by_name():
    for module in ("trainer", "learner", "batching"):
        strings = {node.value for node in ast.walk(ast.parse((FOLDER.parent / f"{module}.py").read_text()))
                   if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        assert not strings & set(ALGORITHMS), module


# ---- contradictions -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("settings, refused", [
    ({"eps_min": 0.11}, True), ({"alpha": 0.2}, True), ({"eps_min": 0.12}, False), ({"alpha": 0.2, "eps_min": 0.16}, False), ({}, False),
    ({"alpha": 0.2, "kappa": 0.0}, False)])
def test_prop_1_is_claimed_only_where_it_holds(settings, refused):
    """0.12 = (1 - 0.4) 0.2 and 0.16 = (1 - 0.2) 0.2 are just enough."""
    pacer = EntropyPacer(**settings)
    assert any("Prop. 1" in text for text in pacer.warnings) == refused
    assert EntropyPacer(alpha=0.0).warnings == []
    if refused:
        with pytest.raises(ValueError, match=r"claim_prop1 contradicts .* eps_min = .* is below \(1 - alpha\) eps0"):
            get_algorithm("eppo", claim_prop1=True, **settings)
    else:
        EntropyPacer(claim_prop1=True, **settings)


@pytest.mark.parametrize("name, setting, owner", [("eppo", "schedule_from", "c1_per_task, c4_yoked"), ("eppo", "flip", "c7_reward_spread"),
                                                  ("c6_success", "flip", "c7_reward_spread"), ("bapo", "eps0", "rloo_eppo, eppo"),
                                                  ("c4_yoked", "alpha", "rloo_eppo, eppo"), ("agentrl", "target", "bapo")])
def test_the_setting_of_another_pacer_is_refused_by_its_name(name, setting, owner):
    with pytest.raises(ValueError, match=f"unknown setting of method '{name}': '{setting}' belongs to {owner}.*one method and one pacer"):
        get_algorithm(name, **{setting: 1})


@pytest.mark.parametrize("bases", [(EPPO, BAPO), (BAPO, EPPO), (SuccessPacing, ClipEqualiser), (SuccessPacing, BAPO)])
def test_a_method_of_two_pacers_is_refused(bases, monkeypatch):
    monkeypatch.setattr("eppo.algorithms.ALGORITHMS", dict(ALGORITHMS))
    with pytest.raises(TypeError, match="method 'both' has two pacers, .* of which one would be ignored"):
        register("both", type("Both", bases, {}))
    for base in (EntropyBonus, ClipCov):                    # these add to whatever paces
        register(f"eppo_{base.__name__.lower()}", type("Sum", (base, EPPO), {}))


# ---- what the pacer is fed ----------------------------------------------------------------------------------------------
def test_a_lag_of_one_feeds_the_batch_before():
    """What acts in step t with a lag is what would have acted in step t - 1 without; the first step has nothing."""
    now, late = begun("eppo"), begun("eppo", entropy_lag=1)
    plain = [now.pace(stats(step)) for step in STEPS]
    lagged = [late.pace(stats(step)) for step in STEPS]
    assert lagged[0] == {} and lagged[1:] == plain[:2]
    lo_BT, hi_BT = late.bounds(make_batch(), lagged[0])
    assert set(lo_BT.flatten().tolist()) == {0.8} and set(hi_BT.flatten().tolist()) == {1.2}
    again = begun("eppo", entropy_lag=1)
    again.load_state_dict(late.state_dict())
    assert again.pace(stats(STEPS[0])) == plain[2]
    with pytest.raises(ValueError, match="entropy_lag must be 0"):
        get_algorithm("eppo", entropy_lag=2)


@pytest.mark.parametrize("name", [name for name in NAMES if "entropy_lag" in ALGORITHMS[name].setting_names()])
def test_every_paced_method_runs_with_a_lag(name):
    method = begun(name, entropy_lag=1)
    for step in STEPS:
        eps = method.pace(stats(step))
    assert set(eps) == set(TASKS) and all(math.isfinite(value) for value in eps.values())


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    return start_folder(tmp_path_factory)


def test_references_of_a_calibration_run(start, tmp_path):
    tasks = ("toy_coin", "toy_dice")
    still = smoke_run(start, tmp_path / "still", "agentrl", **{"optim.lr": 0.0})
    rows = still.steps[still.steps["step"] > 0]
    assert rows["task/toy_coin/entropy"].nunique() == 3     # three batches of one policy
    found = read_references(str(still.path), tasks, 2)
    tokens = (rows["task/toy_coin/sampled_tokens"] * rows["task/toy_coin/episodes"])[:2]
    assert found["toy_coin"] == pytest.approx((rows["task/toy_coin/entropy"][:2] * tokens).sum() / tokens.sum())
    method = get_algorithm("eppo", reference_from=str(still.path), ref_batches=2)
    method.begin(MODEL, tasks, 3, 0)
    method.pace(stats({"toy_coin": 2 * found["toy_coin"], "toy_dice": found["toy_dice"]}))
    reading = method.pacer.readings["toy_coin"]
    assert reading.reference == found["toy_coin"] and reading.ratio == pytest.approx(2) and reading.eps > 0.2
    run = smoke_run(start, tmp_path / "run", "eppo", reference_from=str(still.path), ref_batches=2)
    assert run.steps["pacer/toy_dice/reference"].dropna().tolist() == [found["toy_dice"]] * 3

    moved = smoke_run(start, tmp_path / "moved", "agentrl")
    assert read_references(str(moved.path), tasks, 1)["toy_coin"] == moved.steps["task/toy_coin/entropy"].dropna().iloc[0]
    with pytest.raises(ValueError, match="trained .optim.lr 0.003., so only its first batch"):
        read_references(str(moved.path), tasks, 2)
    with pytest.raises(ValueError, match="has 3 batches, ref_batches asks for 5"):
        read_references(str(still.path), tasks, 5)
    with pytest.raises(ValueError, match="reference_from .* has the tasks"):
        read_references(str(still.path), ("toy_coin",), 1)
    with pytest.raises(ValueError, match="nats per token, which entropy_unit 'turn_sum' cannot use"):
        get_algorithm("eppo", reference_from="x", entropy_unit="turn_sum")
    arm = smoke_run(start, tmp_path / "arm", "c5_inverted", seed=7)
    with pytest.raises(ValueError, match="'c5_inverted', in which EPPO's pacer set nothing"):
        read_schedule(str(arm.path), tasks, 3, 0)


def test_given_references_come_before_the_first_batch():
    pacer = EntropyPacer()
    pacer.set_references({"db": 0.5, "os": 1e-5})
    readings = pacer.observe({"db": (4.0, 10)})
    assert readings["db"].ratio == pytest.approx(0.8) and readings["os"].eps == 0.2 and not readings["os"].observed
    assert any("reference entropy of task 'os' is below" in text for text in pacer.warnings)
    pacer.observe({"os": (4.0, 10)})
    assert pacer.readings["os"].z == 0                      # floored: out of the cohort
    for bad in ({"db": 0.4}, {"kg": math.nan}, {"kg": -1.0}):
        with pytest.raises(ValueError, match="a reference must be finite"):
            pacer.set_references(bad)


# ---- warnings -----------------------------------------------------------------------------------------------------------
def test_an_arm_of_another_mean_width_is_warned_of():
    method = begun("c0_fixed", eps=0.28)
    for number in range(10):
        assert method.warnings == [] or number == 9
        method.pace(stats(STEPS[number % 3], clip_high=0.1))
    assert [text for text in method.warnings if "differs by more than 2 %" in text]
    metrics = method.metrics()
    assert metrics["control/eps_mean_all"] == pytest.approx(0.28) and 0.15 < metrics["control/eppo_eps_mean_all"] < 0.25
    matched = begun("c10_level", match_mean=True)
    for number in range(12):
        matched.pace(stats(STEPS[number % 3], clip_high=0.1))
    assert matched.warnings == []
    assert begun("c11_weights", match_mean=True).pace(stats(STEPS[0])) == dict.fromkeys(TASKS, pytest.approx(0.2))


def test_warnings_reach_the_record(start, tmp_path):
    """Two tasks under EPPO: said in run.json from the first steps on."""
    run = smoke_run(start, tmp_path / "run", "eppo")
    assert [text for text in run.info["warnings"] if "two tasks" in text]
    floored = smoke_run(start, tmp_path / "floored", "eppo", h_floor=50.0)
    assert sum("reference entropy of task" in text for text in floored.info["warnings"]) == 2


# ---- records ------------------------------------------------------------------------------------------------------------
def test_leave_one_out_logs_its_baseline():
    """Rewards 1, 0, 0, 0 in every group: baselines 0, 1/3, 1/3, 1/3; advantages 1, -1/3, -1/3, -1/3."""
    batch = make_batch(rewards=[1, 0, 0, 0] * 6)
    for name in ("rloo", "rloo_eppo"):
        method = begun(name)
        method.advantages(batch)
        metrics = method.metrics()
        assert metrics["rloo/baseline_std"] == pytest.approx(math.sqrt(3) / 12) and metrics["rloo/adv_abs"] == pytest.approx(0.5)
    grpo = begun("grpo")
    grpo.advantages(batch)
    assert not [name for name in grpo.metrics() if name.startswith("rloo/")]


def test_dcpo_logs_the_ends_of_its_bounds():
    method, batch = begun("dcpo"), make_batch()
    lo_BT, hi_BT = method.bounds(batch, {})
    metrics = method.metrics()
    for name, bound_BT in (("lo", lo_BT), ("hi", hi_BT)):
        values = bound_BT[batch.mask_BT].tolist()
        assert (metrics[f"dcpo/{name}_min"], metrics[f"dcpo/{name}_max"]) == (min(values), max(values))
