"""SEAL's six diagnostics: four on records, two on a model or tensors; and all of them on the records of a run."""

import math

import pandas as pd
import pytest
import torch
from method_batches import make_batch, smoke_run, start_folder
from models import tiny_model

from eppo.files import read_lines
from eppo.policy import load_tokenizer
from eppo.seal_diagnostics import (clicked_values, duplication_over_time, format_errors, gradient_interference, interference_slope,
                                   is_off_page, off_page_clicks, sentence_duplication, state_similarity, trajectory_gradients,
                                   trajectory_states, valid_log_probability)


class Letters:
    """A tokenizer of one letter per token."""

    @staticmethod
    def decode(ids):
        return "".join(map(chr, ids))


def row(page, turn, step=1, logp=-0.5, seed=0, task="webshop"):
    text = page + turn
    return {"step": step, "task": task, "group": "g", "seed": seed, "ids": [ord(letter) for letter in text],
            "mask": [0] * len(page) + [1] * len(turn), "sampler_logp": [0.0] * len(page) + [logp] * len(turn),
            "turns": [[len(page), len(text), "stop"]]}


def test_sentence_duplication():
    assert sentence_duplication("I search. I click. i search.  Done!") == 0.5
    assert sentence_duplication("One. Two.") == 0.0 and sentence_duplication("") == 0.0
    assert sentence_duplication("a\na\na") == 1.0
    call = '<tool_call>\n{"name": "look", "arguments": {"word": "apple"}}\n</tool_call>'
    assert sentence_duplication(f"{call}<|im_end|>") == 0.0             # its tags are no sentences
    assert sentence_duplication(f"{call}\n{call}<|im_end|>") == 1.0
    frame = duplication_over_time([row("page", "Go. Go."), row("page", "Go. Stop.", step=2), row("p", "x", step=2)], Letters())
    assert frame.to_dict("records") == [{"step": 1, "task": "webshop", "duplication": 1.0, "episodes": 1},
                                        {"step": 2, "task": "webshop", "duplication": 0.0, "episodes": 2}]


def test_duplication_is_within_a_response():
    """The same call in two turns is no duplicate: each turn is a response of its own."""
    one = row("page", "Go. Go.")
    two = row("next page", "Go. Stop.")
    both = one | {"ids": one["ids"] + two["ids"], "turns": one["turns"] + [[start + len(one["ids"]), stop + len(one["ids"]), "stop"]
                                                                           for start, stop, _ in two["turns"]]}
    assert duplication_over_time([both], Letters())["duplication"].tolist() == [0.5]
    assert duplication_over_time([one | {"turns": []}], Letters()).empty


def test_format_errors_and_log_probability_of_valid_episodes():
    episodes = pd.DataFrame([{"step": 1, "task": "webshop", "group": "g", "seed": seed, "invalid_calls": bad, "turns": 4}
                             for seed, bad in ((0, 0), (1, 2))])
    assert format_errors(episodes).to_dict("records") == [{"step": 1, "task": "webshop", "format_errors": 0.25,
                                                           "format_error_frac": 0.5,
                                                          "episodes": 2}]
    frame = valid_log_probability([row("p", "four", logp=-.5), row("p", "four", logp=-9., seed=1)], episodes)
    assert frame.to_dict("records") == [{"step": 1, "task": "webshop", "logp": -2.0, "logp_per_token": -.5, "episodes": 1}]
    assert valid_log_probability([], episodes).empty


def test_clicks_that_are_not_on_the_page():
    call = '<tool_call>\n{"name": "click_action", "arguments": {"value": "%s"}}\n</tool_call>'
    assert clicked_values("so " + call % "B01" + call % "red" + "<tool_call>{bad}</tool_call>") == ["B01", "red"]
    assert clicked_values('<tool_call>{"name": "search_action", "arguments": {"keywords": "red"}}</tool_call>') == []
    assert is_off_page("red", "bored clerk") and is_off_page("i6", "i60 shirt") and not is_off_page("[b01]", "see [B01] here")
    assert is_off_page("", "any page")
    assert not is_off_page("Buy  Now", "") and not is_off_page("RED", "color: red, blue") and is_off_page("green", "color: red")
    frame = off_page_clicks([row("page with B01", call % "B01" + call % "B99"), row("page", "no click")], Letters())
    assert frame.to_dict("records") == [{"step": 1, "task": "webshop", "off_page_frac": 0.5, "episodes": 1}]


def test_state_similarity():
    found = state_similarity([[1., 0.], [2., 0.], [0., 1.], [0., 3.]], [True, True, False, False])
    assert found == {"correct": 1.0, "wrong": 1.0, "between": 0.0}
    assert math.isnan(state_similarity([[1., 0.]], [True])["correct"])


def test_gradient_interference():
    gradients = torch.tensor([[1., 0.], [1., 0.], [-1., 1.]])
    assert gradient_interference(gradients).tolist() == pytest.approx([1 / 3, 1 / 3, 0.])
    assert gradient_interference(gradients, normalise=True)[0] == pytest.approx((2 - .5**.5) / 3)
    assert interference_slope([3., 1., -1.], [-1., 0., 1.]) == pytest.approx({"slope": -2, "correlation": -1})
    assert math.isnan(interference_slope([1., 2.], [1., 1.])["slope"])


def test_states_and_gradients_of_a_model():
    batch, model = make_batch(groups=1, size=2, tasks=("db",)), tiny_model()
    batch.ids_BT.copy_(torch.randint(0, 300, batch.ids_BT.shape, generator=torch.Generator().manual_seed(0)))
    states_BD = trajectory_states(model, batch)
    hidden = model.base_model(input_ids=batch.ids_BT).last_hidden_state
    assert torch.allclose(states_BD[1], hidden[1][batch.mask_BT[1]].mean(0), atol=1e-5)
    gradients_BP = trajectory_gradients(model, batch)
    step, h = gradients_BP[0] / gradients_BP[0].norm(), 1e-3
    with torch.no_grad():
        def total(sign):
            for parameter, piece in zip(model.parameters(), step.split([p.numel() for p in model.parameters()])):
                parameter += sign * h * piece.view_as(parameter)
            logits = model(input_ids=batch.ids_BT[:1]).logits[0, :-1].double().log_softmax(-1)
            return float(logits.gather(1, batch.ids_BT[0, 1:, None])[:, 0][batch.mask_BT[0, 1:]].sum())
        up, down = total(1), total(-2)
    assert (up - down) / (2 * h) == pytest.approx(float(gradients_BP[0].norm()), rel=0.02)


def test_on_the_records_of_a_run(tmp_path_factory, tmp_path):
    """What a run writes is what the functions read: a row for every step and task; a toy run has no shop to click in."""
    run = smoke_run(start_folder(tmp_path_factory), tmp_path / "run", "seal", trajectories="all")
    rows, tokenizer = read_lines(run.path / "trajectories.jsonl"), load_tokenizer(str(run.path / "model"))
    places = [(step, task) for step in (1, 2, 3) for task in ("toy_coin", "toy_dice")]
    for frame, column in ((duplication_over_time(rows, tokenizer), "duplication"), (format_errors(run.episodes), "format_error_frac")):
        assert list(zip(frame["step"], frame["task"])) == places and frame["episodes"].tolist() == [5] * 6
        assert frame[column].between(0, 1).all()
    none = valid_log_probability(rows, run.episodes.assign(invalid_calls=1))
    assert none.empty and list(none) == ["step", "task", "logp", "logp_per_token", "episodes"]
    valid = valid_log_probability(rows, run.episodes.assign(invalid_calls=0))
    assert valid["episodes"].sum() == 30 and (valid["logp"] < valid["logp_per_token"]).all() and (valid["logp_per_token"] < 0).all()
    clicks = off_page_clicks(rows, tokenizer)
    assert clicks.empty and list(clicks) == ["step", "task", "off_page_frac", "episodes"]
