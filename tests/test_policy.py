"""Scores of sampled tokens: temperature, entropy, masks, chunks; the micro tokenizer."""

import math

import pytest
import torch
from models import tiny_model, tiny_tokenizer
from transformers import AutoTokenizer

from envs.base import assistant_call, function_tool
from envs.tool_calls import render_turn
from eppo.policy import LAYOUT, build_micro_model, load_policy, splits_cleanly, token_scores, train_micro_tokenizer


def test_scores_equal_a_plain_softmax_at_the_temperature():
    model = tiny_model()
    ids = torch.randint(0, 300, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(3, 12, dtype=torch.bool)
    mask[0, 4:9] = mask[1, 1:3] = mask[2, 11] = True
    scores = token_scores(model, ids, mask, 0.7)
    logps = torch.log_softmax(model(ids).logits.double() / 0.7, -1)
    for b, t in mask.nonzero().tolist():
        row = logps[b, t - 1]
        assert scores.logp_BT[b, t].item() == pytest.approx(row[ids[b, t]].item(), abs=1e-5)
        assert scores.entropy_BT[b, t].item() == pytest.approx(-(row.exp() * row).sum().item(), abs=1e-5)
    assert scores.logp_BT[~mask].abs().max() == 0 and scores.entropy_BT[~mask].abs().max() == 0
    assert 0 <= scores.entropy_BT.min() and scores.entropy_BT.max() <= math.log(len(tiny_tokenizer()))


def test_padding_and_chunks_change_nothing():
    model = tiny_model()
    ids = torch.randint(0, 300, (2, 10), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[:, 0] = False
    padded = torch.cat([ids, torch.full((2, 50), 3)], 1), torch.cat([mask, torch.zeros(2, 50, dtype=torch.bool)], 1)
    gradients = []
    for args, chunk in (((ids, mask), 4096), (padded, 4096), ((ids, mask), 5)):
        model.zero_grad()
        scores = token_scores(model, *args, entropy_grad=True, chunk=chunk)
        (scores.logp_BT.sum() + scores.entropy_BT.sum()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for other in gradients[1:]:
        assert (other - gradients[0]).abs().max() < 1e-4 * gradients[0].abs().max()


def test_entropy_has_a_gradient_only_where_asked():
    model = tiny_model()
    ids, mask = torch.ones(1, 4, dtype=torch.long), torch.tensor([[False, True, True, True]])
    assert not token_scores(model, ids, mask).entropy_BT.requires_grad
    assert token_scores(model, ids, mask, entropy_grad=True).entropy_BT.requires_grad


def test_a_model_that_scales_its_logits_is_scored_through_its_own_forward():
    from transformers import GraniteConfig, GraniteForCausalLM

    torch.manual_seed(0)
    model = GraniteForCausalLM(GraniteConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                             num_key_value_heads=1, intermediate_size=32, logits_scaling=4.0))
    ids, mask = torch.tensor([[1, 2, 3]]), torch.tensor([[False, True, True]])
    assert not splits_cleanly(model)
    expected = torch.log_softmax(model(ids).logits, -1)[0, [0, 1], [2, 3]]
    assert torch.allclose(token_scores(model, ids, mask).logp_BT[0, 1:], expected, atol=1e-6)


def test_micro_model_is_the_same_for_the_same_seed_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second, other = (build_micro_model(300, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters())]
    assert all(same) and not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters()))


def test_default_micro_model_has_about_a_million_parameters():
    assert 0.8e6 < sum(p.numel() for p in build_micro_model(1024).parameters()) < 3e6


def test_micro_tokenizer_splits_digits_keeps_text_and_has_the_tags():
    tokenizer = tiny_tokenizer()
    text = 'apple 027, "x_9"\n<tool_call>\n{"name": "look", "arguments": {"word": "apple"}}\n</tool_call> \u00e9'
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode([i]) for i in tokenizer.encode("027")] == ["0", "2", "7"]
    fixed = [*LAYOUT, '<tool_call>\n{"name": "look", "arguments": {"word": "', '"}}\n</tool_call>']
    assert all(len(tokenizer.encode(piece)) == 1 for piece in fixed)
    assert tokenizer.eos_token == "<|im_end|>" and len(tokenizer.encode("<|im_start|>")) == 1


def test_calls_with_two_arguments_and_lists_have_their_pieces_as_tokens():
    tools = [function_tool("pair", "", first="a", second="b"),
             function_tool("many", "", names={"type": "array", "items": {"type": "string"}})]
    tokenizer = train_micro_tokenizer(["alpha beta"], tools, vocab=320)
    for message, middle in ((assistant_call("pair", first="alpha", second="beta"), '", "second": "'),
                            (assistant_call("many", names=["alpha"]), None)):
        pieces = [tokenizer.decode([i]) for i in tokenizer.encode(render_turn(message))]
        assert pieces[0].startswith("<tool_call>") and pieces[0].endswith('"') and pieces[-1].endswith("</tool_call>")
        assert middle is None or middle in pieces


def test_micro_tokenizer_does_not_depend_on_the_run():
    texts = ["alpha beta gamma delta"] * 3
    first, second = (train_micro_tokenizer(texts, vocab=300).backend_tokenizer.to_str() for _ in range(2))
    assert first == second


def test_policy_folder_round_trip(tmp_path):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, tokens = load_policy(str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
    assert tokens.chat_template == tokenizer.chat_template
    assert tokens.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_a_reloaded_tokenizer_cuts_text_as_the_trained_one_did(tmp_path):
    """With Qwen2's configuration beside it: ": " must stay one token where training made it one."""
    tokenizer = train_micro_tokenizer(["house: one action; at table: two"] * 20, vocab=330)
    build_micro_model(len(tokenizer), hidden=32, layers=1, heads=2, kv_heads=1, mlp=64).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text = "house: one; at table: 27 x"
    assert ": " in [tokenizer.decode([i]) for i in tokenizer.encode(text)]
    assert load_policy(str(tmp_path))[1].encode(text) == tokenizer.encode(text)
    load_policy(str(tmp_path))[1].save_pretrained(tmp_path / "again")                   # as a training run saves what it loaded
    build_micro_model(len(tokenizer), hidden=32, layers=1, heads=2, kv_heads=1, mlp=64).save_pretrained(tmp_path / "again")
    for folder in (tmp_path, tmp_path / "again"):           # as servers and other tools read it
        for trust in (None, False, True):
            assert AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust).encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize("left_out, words", [
    ("config.json", "the folder has no config.json"), ("tokenizer.json", "the folder has no tokenizer .tokenizer.json.; save the model's"),
    ("model.safetensors", "the folder has no weights .model.safetensors."), (None, "its tokenizer has no chat template")])
def test_what_a_model_folder_lacks_is_named_in_one_line(tmp_path, left_out, words):
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / (left_out or "chat_template.jinja")).unlink()
    with pytest.raises(ValueError, match=words) as caught:
        load_policy(str(tmp_path))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "config.json"])
def test_a_broken_file_of_a_model_folder_is_one_line(tmp_path, name):
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(b"{")
    with pytest.raises(ValueError, match="in this folder cannot be read .*save or download it again") as caught:
        load_policy(str(tmp_path))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("path, words", [
    ("{}/nothing", "there is no such folder; give a model's folder, a hub id"), ("./nothing", "there is no such folder"),
    ("Nobody/Such-Model", "as a hub id its tokenizer cannot be had: misspelt, gated, or offline .*hf download Nobody"),
    ("micr", "no such folder here, and as a hub id")])
def test_a_path_without_a_model_is_named(tmp_path, path, words):
    with pytest.raises(ValueError, match=words) as caught:
        load_policy(path.format(tmp_path))
    assert "\n" not in str(caught.value)
