"""`check_env` passes a sound toy environment, and names what is wrong with each of many broken ones."""

import pytest

from envs.base import Env, Status, assistant_call, function_tool
from envs.check import CheckFailed, check_env
from envs.instances import generate

WORDS = ("ant", "bee", "cow", "dog", "elk", "fox", "gnu", "hen", "ibis", "jay", "kiwi", "lion", "mole", "newt", "owl", "pig")


class Boxes(Env):
    """Two boxes; look into the named one and say the word. The word is in no prompt."""

    task = "boxes"
    turn_limits = {"micro": 4}
    sizes = ("micro",)
    tools = [function_tool("look", "Look into a box.", box="its colour"), function_tool("say", "Answer.", word="the word")]

    def _load(self):
        def draw(rng, index):
            return ("red", "blue")[index % 2], {"red": rng.choice(WORDS), "blue": rng.choice(WORDS),
                                                "wanted": ("red", "blue")[index % 2]}
        return generate("boxes", "micro", self.split, draw, count=6)

    def _start(self, instance, rng):
        self.seen = False
        return [{"role": "system", "content": "Find the word."}, {"role": "user", "content": f"Box {instance.data['wanted']}?"}]

    def _call(self, call):
        if call.name == "look":
            box = call.arguments["box"]
            self.seen = self.seen or box == self.instance.data["wanted"]
            return self.instance.data[box] if box in ("red", "blue") else "No such box."
        self._finish(Status.COMPLETED, float(call.arguments["word"] == self.instance.data[self.instance.data["wanted"]]))
        return None

    def expert(self):
        data = self.instance.data
        return assistant_call("say", word=data[data["wanted"]]) if self.seen else assistant_call("look", box=data["wanted"])

    def oracle(self, index):
        data = self.instances[index].data
        return [assistant_call("look", box=data["wanted"]), assistant_call("say", word=data[data["wanted"]])]

    def mistake(self, rng):
        return assistant_call("look", box=rng.choice(("red", "blue", "grey")))


def test_a_sound_environment_passes_and_is_measured():
    rows = check_env(Boxes, sample=4)
    assert [(row["split"], row["kind"], row["instances"], row["max_turns"]) for row in rows] == [
        (split, kind, 3, 2) for split in ("train", "dev", "test") for kind in ("blue", "red")]
    assert all(150 < row["mean_chars"] <= row["max_chars"] < 260 and row["noisy_solved"] is not None for row in rows)


def test_an_episode_length_counts_prompt_turns_and_observations():
    env = Boxes()
    rows = check_env(Boxes, splits=("train",), sample=6)
    look = '<tool_call>\n{"name": "look", "arguments": {"box": "red"}}\n</tool_call>'
    say = '<tool_call>\n{"name": "say", "arguments": {"word": ""}}\n</tool_call>'
    lengths = [len("Find the word.Box red?" + look + say) + 2 * len(item.data["red"]) for item in env.instances
               if item.kind == "red"]
    assert max(lengths) == next(row["max_chars"] for row in rows if row["kind"] == "red")


class Unseeded(Boxes):
    count = 0

    def _start(self, instance, rng):
        type(self).count += 1
        messages = super()._start(instance, rng)
        messages[1]["content"] += str(self.count)
        return messages


class WrongOracle(Boxes):
    def oracle(self, index):
        return [assistant_call("say", word="wrong")]


class LazyExpert(Boxes):
    def expert(self):
        return assistant_call("look", box="red")


class GivesAway(Boxes):
    def _no_call(self, parsed):
        self._finish(Status.COMPLETED, 1.0)
        return super()._no_call(parsed)


class Raises(Boxes):
    def _call(self, call):
        if len(call.arguments.get("word", "")) > 1000:
            raise RuntimeError("too long")
        return super()._call(call)


class Silent(Boxes):
    def _call(self, call):
        super()._call(call)
        return None


class Terse(Boxes):
    def _bad_call(self, call):
        return "Error."


class Mutates(Boxes):
    def _call(self, call):
        answer = super()._call(call)
        self.instance.data["note"] = "touched"
        return answer


class SameEverywhere(Boxes):
    def _load(self):
        split, self.split = self.split, "train"
        try:
            return super()._load()
        finally:
            self.split = split


class LimitCompletes(Boxes):
    def _out_of_turns(self):
        self._finish(Status.COMPLETED, 0.0)


class ClosesOnce(Boxes):
    def close(self):
        self.open = not getattr(self, "open", True)
        if self.open:
            raise RuntimeError("already closed")


class Shared(Boxes):
    seen = False
    world = {}

    def _start(self, instance, rng):
        self.world["current"] = instance.data
        return super()._start(instance, rng)

    def _call(self, call):
        self.instance = type(self.instance)(self.instance.id, "boxes", "red", self.world["current"])
        return super()._call(call)


class OneThread(Boxes):
    def _start(self, instance, rng):
        import threading
        self.owner = threading.current_thread()
        return super()._start(instance, rng)

    def _call(self, call):
        if not self.owner.is_alive():
            raise RuntimeError("the thread that started this world has ended")
        return super()._call(call)


class NeverRecovers(Boxes):
    def mistake(self, rng):
        return assistant_call("say", word="wrong")


class InvalidMistake(Boxes):
    def mistake(self, rng):
        return assistant_call("peek", box="red")


class Surrogates(Boxes):
    def _call(self, call):
        return super()._call(call) and "\ud800"


class Generous(Boxes):
    def _finish(self, status, reward, *args, **kwargs):
        super()._finish(status, 2 * reward, *args, **kwargs)


class Tuples(Boxes):
    def _load(self):
        instances = super()._load()
        for item in instances:
            item.data["pair"] = (1, 2)
        return instances


@pytest.mark.parametrize("broken, complaint", [
    (Unseeded, "the same index and seed give other opening messages"),
    (WrongOracle, "oracle() ends with reward 0.0"),
    (LazyExpert, "expert play ends with reward 0.0, status 'task limit reached', truncated"),
    (GivesAway, "garbage turn 'I am not sure what to do.': rewarded with 1.0"),
    (Raises, "raised RuntimeError: too long"),
    (Silent, "the episode goes on, but no observation came"),
    (Terse, "look without arguments: 'Error.' does not name 'box'"),
    (Mutates, "an episode changed the instance's data"),
    (SameEverywhere, "splits must be disjoint"),
    (LimitCompletes, "expected truncated, 'task limit reached', 0"),
    (ClosesOnce, "close twice: raised RuntimeError: already closed"),
    (Shared, "an episode played beside another ends with reward 0.0"),
    (OneThread, "raised RuntimeError: the thread that started this world has ended"),
    (InvalidMistake, "mistake() is an invalid call: unknown tool 'peek'"),
    (Surrogates, "surrogates not allowed"),
    (Generous, "reward 2.0 is outside [0, 1]"),
    (Tuples, "not an Instance of this task with plain JSON data"),
], ids=lambda value: value.__name__ if isinstance(value, type) else "")
def test_a_broken_environment_is_named(broken, complaint):
    with pytest.raises(CheckFailed) as failure:
        check_env(broken, sample=4)
    assert complaint in str(failure.value)
    assert str(failure.value).startswith("boxes: ")


def test_an_expert_that_does_not_recover_is_named():
    with pytest.raises(CheckFailed, match=r"solves \d+ of 12 episodes in which mistake\(\) spoke at rate 0.8; it must .* 50%"):
        check_env(NeverRecovers, sample=4, noise=0.8)
