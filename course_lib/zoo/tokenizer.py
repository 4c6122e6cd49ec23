"""Text to token ids and back, for a byte-level BPE vocabulary with a chat template."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from course_lib.model.checks import require


def describe_bpe(tokens: list[str], merges: list[str], special: list[str]) -> str:
    """The byte-level BPE with these tokens (in the order of their ids) as JSON text.

    `merges` are pairs "left right", the earliest first; a digit is always its own token;
    `special` tokens are recognised whole. Source: Sennrich et al., arXiv 1508.07909;
    bytes as letters: GPT-2. Module 16."""
    ids = {token: i for i, token in enumerate(tokens)}
    bpe = Tokenizer(models.BPE(vocab=ids, merges=[tuple(pair.split(" ")) for pair in merges]))
    digits = pre_tokenizers.Digits(individual_digits=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(special)
    return bpe.to_str()


def letter_bytes() -> dict[str, int]:
    """GPT-2's alphabet, letter -> byte: printable bytes are their own letter, the other 68
    take the letters from code point 256 on. Module 16."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class ChatTokenizer:
    """Token ids of texts and of conversations, and the texts of token ids.

    `eos_ids` are the ids after which a text has ended. Module 16."""

    def __init__(self, bpe: str, chat_template: str, eos_ids: list[int]):
        self.bpe = Tokenizer.from_str(bpe)
        self.chat_template = chat_template
        self.eos_ids = tuple(eos_ids)
        self.letters = letter_bytes()
        self.special = set(self.bpe.get_added_tokens_decoder())

    @property
    def vocab_size(self) -> int:
        """Number of tokens, the special ones included. Module 16."""
        return self.bpe.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, nothing put before or after it.

        A special token written out, such as <|im_end|>, becomes its single id. Module 16."""
        return self.bpe.encode(text).ids

    def decode(self, ids, skip_special: bool = False) -> str:
        """The text of one row of ids, without special tokens if `skip_special`.

        Bytes that end within a character show as U+FFFD. Raises ValueError for an id
        outside the vocabulary or more than one row. Module 16."""
        return self.bpe.decode(self.check_ids(ids), skip_special_tokens=skip_special)

    def tokens(self, ids) -> list[str]:
        """The piece of text behind each id, spaces kept: [" Paris", "."].

        A byte that is no whole character shows as \\xNN. Raises ValueError as `decode`
        does. Module 16."""
        return [self.piece(i) for i in self.check_ids(ids)]

    def piece(self, i: int) -> str:
        token = self.bpe.id_to_token(i)
        if i in self.special:  # written in plain letters, not in GPT-2's
            return token
        return bytes(self.letters[c] for c in token).decode(errors="backslashreplace")

    def check_ids(self, ids) -> list[int]:
        """`ids`, a list or a tensor of shape (T,), as a list of ints of the vocabulary."""
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        for i in ids:
            require(
                isinstance(i, int) and 0 <= i < self.vocab_size,
                f"ids holds {i!r}, which is no token id.",
                f"Give one row of ints from 0 to {self.vocab_size - 1}, for example ids[0].",
            )
        return ids

    def chat(self, messages: list[dict]) -> list[int]:
        """Token ids of a conversation, up to the point where the assistant answers.

        A message is {"role": "user", "content": "..."}; the model's own template adds the
        markers and, where there is none, a system message. Raises ValueError for a message
        of another form or for none at all. Module 16."""
        return self.encode(self.render(messages))

    def render(self, messages: list[dict]) -> str:
        """The text of a conversation with all markers, as `chat` encodes it. Module 16."""
        # the template is a program that came with the file: it runs in a sandbox
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        check_messages(messages)
        jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        template = jinja.from_string(self.chat_template)
        return template.render(messages=messages, add_generation_prompt=True)


def check_messages(messages: list[dict]):
    require(
        isinstance(messages, (list, tuple)) and len(messages) > 0,
        f"messages={messages!r} is no conversation.",
        'Give a list such as [{"role": "user", "content": "Hello"}].',
    )
    for message in messages:
        require(
            isinstance(message, dict)
            and all(isinstance(message.get(key), str) for key in ("role", "content")),
            f"messages holds {message!r}.",
            'Each message is {"role": "system", "user" or "assistant", "content": a text}.',
        )
