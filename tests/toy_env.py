"""Two tiny tasks for tests of rollouts and training: no process, no file, microseconds a step."""

import random

import envs
from envs.base import Env, Status, assistant_call, function_tool
from envs.instances import generate

WORDS = "apple brick cedar delta ember flint grape hazel".split()


class LookupEnv(Env):
    """Look a word's number up, then answer it."""

    task = "toy_lookup"
    turn_limits = {"micro": 4, "small": 4}
    tools = [function_tool("look", "Number of a word.", word="the word"), function_tool("answer", "End.", value="the number")]
    asked = True

    def _load(self):
        return generate(self.task, self.size, self.split, self._draw, count={"train": 40, "dev": 8, "test": 8}[self.split])

    def _draw(self, rng: random.Random, index: int):
        return "lookup", {"word": rng.choice(WORDS), "number": str(rng.randrange(1000))}

    def _start(self, instance, rng):
        self.looked = False
        return [{"role": "system", "content": "look then answer"}, {"role": "user", "content": instance.data["word"]}]

    def _call(self, call):
        data = self.instance.data
        if call.name == "look":
            self.looked = True
            return data["number"] if call.arguments["word"] == data["word"] else "none"
        self._finish(Status.COMPLETED, float(call.arguments["value"] == data["number"]))
        return None

    def expert(self):
        data = self.instance.data
        return assistant_call("answer", value=data["number"]) if self.looked else assistant_call("look", word=data["word"])

    def oracle(self, index):
        data = self.instances[index].data
        return [assistant_call("look", word=data["word"]), assistant_call("answer", value=data["number"])]

    def mistake(self, rng):
        return assistant_call("look", word=rng.choice(WORDS)) if rng.random() < 0.7 else assistant_call("answer", value="0")


class ParityEnv(LookupEnv):
    """Answer whether the shown number is even: one turn."""

    task = "toy_parity"

    def _draw(self, rng, index):
        return "parity", {"word": str(rng.randrange(1000)), "number": ""}

    def _start(self, instance, rng):
        self.looked = True
        return [{"role": "system", "content": "even or odd"}, {"role": "user", "content": instance.data["word"]}]

    def _call(self, call):
        if call.name == "look":
            return "no"
        self._finish(Status.COMPLETED, float(call.arguments["value"] == self._gold(self.instance)))
        return None

    @staticmethod
    def _gold(instance):
        return "odd" if int(instance.data["word"]) % 2 else "even"

    def expert(self):
        return assistant_call("answer", value=self._gold(self.instance))

    def oracle(self, index):
        return [assistant_call("answer", value=self._gold(self.instances[index]))]

    def mistake(self, rng):
        return assistant_call("answer", value=rng.choice(["odd", "even"]))


class CoinEnv(LookupEnv):
    """Two turns of any text; rewarded where the second one's length is even: an untrained policy wins half the time."""

    task = "toy_coin"
    sides, turns_played = 2, 2

    def _start(self, instance, rng):
        self.heard = []
        return super()._start(instance, rng)

    def _no_call(self, parsed):
        self.heard.append(parsed.content)
        if len(self.heard) == self.turns_played:
            self._finish(Status.COMPLETED, float(len(parsed.content) % self.sides == 0))
        return {"role": "user", "content": f"number {len(parsed.content)}"}


class DiceEnv(CoinEnv):
    """One turn; rewarded where its length is a multiple of three."""

    task = "toy_dice"
    sides, turns_played = 3, 1


TOY_TASKS = ("toy_lookup", "toy_parity")
GAMBLES = ("toy_coin", "toy_dice")                          # for training from an untrained model
for _cls in (LookupEnv, ParityEnv, CoinEnv, DiceEnv):
    envs.register(_cls.task, _cls)
