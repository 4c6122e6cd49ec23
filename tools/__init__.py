"""Repository machinery: notebooks built from text, executed, and held to their rules."""
