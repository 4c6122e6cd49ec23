"""Numbers that no cell can compute, each with what it means and where it was read."""

FACTS: dict[str, tuple[str, str]] = {
    "671B": ("parameters of DeepSeek-V3, as its report rounds them", "arXiv 2412.19437, abstract"),
    "37B": (
        "parameters of DeepSeek-V3 that one token activates, as its report rounds them",
        "arXiv 2412.19437, abstract",
    ),
    "1,024": (
        "rows of GPT-2's table of learned positions, n_positions in its config",
        "openai-community/gpt2, config.json",
    ),
    "5%": (
        "share of the pre-training compute spent on further training after heads were pooled",
        "arXiv 2305.13245, abstract",
    ),
    "93.3%": (
        "reduction of the cache that DeepSeek-V2 states against DeepSeek 67B",
        "arXiv 2405.04434, abstract",
    ),
    "5.76": (
        "times the generation throughput of DeepSeek 67B that DeepSeek-V2 states",
        "arXiv 2405.04434, abstract",
    ),
}
