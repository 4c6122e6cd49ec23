"""Running a decoder token by token: caches, sampling, generation."""

from .cache import KVCache, RollingCache, new_caches
from .compiled import CompiledDecoder, compile_decode
from .fast import FastDecoder, why_not_fast
from .generate import generate, left_pad
from .sampling import next_token_probabilities, sample

__all__ = [
    "CompiledDecoder",
    "FastDecoder",
    "KVCache",
    "RollingCache",
    "compile_decode",
    "generate",
    "left_pad",
    "new_caches",
    "next_token_probabilities",
    "sample",
    "why_not_fast",
]
