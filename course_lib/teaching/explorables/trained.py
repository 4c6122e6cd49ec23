"""SmolLM2 as the explorables share it: loaded once, refused in a sentence where it is missing."""

from functools import lru_cache

from course_lib.model import ModernDecoder
from course_lib.model.checks import require
from course_lib.zoo.smollm2 import CheckpointError, load_smollm2
from course_lib.zoo.tokenizer import ChatTokenizer


@lru_cache(1)
def loaded() -> tuple[ModernDecoder, ChatTokenizer]:
    return load_smollm2()


def smollm2() -> tuple[ModernDecoder, ChatTokenizer]:
    """The trained model and its tokenizer; ValueError says how to fetch a missing one."""
    try:
        return loaded()
    except CheckpointError as error:
        raise ValueError(str(error)) from error


def tokens_of(text: str, most: int) -> list[int]:
    """Token ids of a reader's text; ValueError for none or for more than `most`."""
    ids = smollm2()[1].encode(text)
    require(bool(ids), "The text is empty.", "Write a word, for example Hello.")
    require(
        len(ids) <= most,
        f"The text is {len(ids)} tokens long.",
        f"At most {most} can be read in the picture: shorten it.",
    )
    return ids


def visible(token: str) -> str:
    """A token as a label: spaces and line ends shown, nothing longer than twelve signs."""
    shown = token.replace("\n", "⏎").replace(" ", "·")
    return shown if len(shown) <= 12 else shown[:11] + "…"
