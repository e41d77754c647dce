"""Where the official files come from, and where the environments expect them below the data folder."""

from __future__ import annotations

from dataclasses import dataclass

_AGENTBENCH = "https://github.com/THUDM/AgentBench/archive/578c5e9.tar.gz"          # Apache-2.0
_ALFWORLD = "https://github.com/alfworld/alfworld/releases/download/0.2.2/json_2.1.1_tw-pddl.zip"   # MIT
_DRIVE = "https://drive.usercontent.google.com/download?export=download&confirm=t&id="             # princeton-nlp/WebShop, MIT


@dataclass(frozen=True, slots=True)
class Item:
    """A file or folder of the data folder.

    Attributes:
        path: below the data folder; a folder ends with "/".
        use: what it is for.
        url: what to download; `member`: what to take out of it, if it is an archive.
        also: patterns of other files that serve as well.
        optional: the task has an official source without it.
    """

    path: str
    use: str
    url: str
    member: str = ""
    also: tuple[str, ...] = ()
    optional: bool = False


def _agentbench(path: str, use: str, member: str, **more: bool) -> Item:
    return Item(path, use, _AGENTBENCH, member, **more)


ITEMS = {
    "alfworld": (
        *(Item(f"alfworld/json_2.1.1/{folder}/", f"games of split {split}", _ALFWORLD, f"json_2.1.1/{folder}/",
               (f"alfworld/json_2.1.*/{folder}/*/*/game.tw-pddl", f"alfworld/games/json_2.1.*/{folder}/*/*/game.tw-pddl") +
               (("alfworld/*.jsonl", "alfworld/*.jsonl.zst") if folder == "train" else ()))
          for split, folder in (("train", "train"), ("dev", "valid_seen"), ("test", "valid_unseen"))),
        _agentbench("alfworld/train_valid.json", "AgentBench's order of split train", "data/alfworld/train_valid.json",
                    optional=True),
        _agentbench("alfworld/new_std.json", "AgentBench's choice and order of split test", "data/alfworld/new_std.json",
                    optional=True)),
    "db": (_agentbench("db/db_out_new.jsonl", "split train", "data/dbbench/db_out_new.jsonl"),
           _agentbench("db/dev.jsonl", "split dev", "data/dbbench/dev.jsonl"),
           _agentbench("db/standard.jsonl", "split test", "data/dbbench/standard.jsonl")),
    "kg": (_agentbench("kg/train.json", "split train", "data/knowledgegraph/kg_rl_all.json"),
           _agentbench("kg/dev.json", "split dev", "data/knowledgegraph/dev.json"),
           _agentbench("kg/std.json", "split test", "data/knowledgegraph/std.json"),
           *(_agentbench(f"kg/ontology/{name}", "Freebase's relations and types",
                         f"src/server/tasks/knowledgegraph/ontology/{name}")
             for name in ("vocab.json", "fb_roles", "reverse_properties"))),
    "os": (_agentbench("os/train.json", "split train", "data/os_interaction/train_0317/training.json"),
           _agentbench("os/dev.json", "split dev", "data/os_interaction/data/dev.json"),
           _agentbench("os/data/", "split test", "data/os_interaction/data/"),
           _agentbench("os/scripts/", "scripts of splits dev and test", "data/os_interaction/scripts/")),
    "webshop": (
        Item("webshop/items_shuffle.json", "1.18 million products (5 GB)", _DRIVE + "1A2whVgOO0euk5O13n2iYDM0bQRkkRduB",
             also=("webshop/items_shuffle_*.json", "webshop/documents*.jsonl.gz")),
        Item("webshop/items_ins_v2.json", "their attributes and synthetic instructions",
             _DRIVE + "1s2j6NgHljiZzQNL3veZaAiyW_qDEgBNi", also=("webshop/items_ins_v2_*.json",)),
        Item("webshop/items_human_ins.json", "12,087 human instructions: the benchmark's goals",
             _DRIVE + "14Kb5SPBk_jfdLZ_CDBNitW98QLDlKR5O", optional=True)),
}
