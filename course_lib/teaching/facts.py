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
}
