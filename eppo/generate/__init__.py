"""Generators: token ids in, sampled token ids and their log-probabilities out. OpenAIGenerator takes messages, for evaluation only."""

from eppo.generate.openai_generator import OpenAIGenerator
from eppo.generate.protocol import FRESH, STALE, Completion, Generator, Request, stable_seed
from eppo.generate.scripted import ScriptedGenerator
from eppo.generate.transformers_generator import TransformersGenerator
from eppo.generate.vllm_generator import VLLMGenerator

__all__ = ["FRESH", "STALE", "Completion", "Generator", "OpenAIGenerator", "Request", "ScriptedGenerator", "TransformersGenerator",
           "VLLMGenerator", "stable_seed"]
