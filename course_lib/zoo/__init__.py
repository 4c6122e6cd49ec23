"""Published models as `ModernDecoder`s; nothing is imported before it is asked for."""

__all__ = ["load_smollm2"]


def __getattr__(name: str):
    # late, so that naming the zoo imports no tokenizer and no file format
    if name in __all__:
        from . import smollm2

        return getattr(smollm2, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
