"""Generators: token ids in, sampled token ids and their log-probabilities out."""

from eppo.generate.protocol import FRESH, STALE, Completion, Generator, Request, stable_seed
from eppo.generate.scripted import ScriptedGenerator
from eppo.generate.transformers_generator import TransformersGenerator

__all__ = ["FRESH", "STALE", "Completion", "Generator", "Request", "ScriptedGenerator", "TransformersGenerator", "stable_seed"]
