"""Exercises on positions: turning heads by RoPE, and stretching its frequencies by YaRN."""

import math

import torch
from torch import Tensor

from course_lib.model import Rope, YaRN, apply_rope, inverse_frequencies, scaled_frequencies

from ..exercise import Case, Exercise, Mistake, named, same
from .inputs import normal

# rotate_heads: heads and positions to turned heads

ROPE_STUB = '''\
def my_rope(x, positions, theta, d_rotated):
    """x (B, H, T, h) turned by positions (T,); channels from d_rotated on pass unchanged."""
    # 1. Frequencies theta^(-2i / d_rotated), one for each of the d_rotated / 2 pairs.
    # 2. Angles (T, d_rotated / 2): position times frequency, in float32 whatever x is.
    # 3. Pair i is channels i and i + d_rotated / 2: (a cos - b sin, b cos + a sin).
    # 4. Put the pairs and the untouched channels together again, in the dtype of x.
    ...


my_rope = check("rotate_heads", my_rope).use
'''


def rope(x: Tensor, positions: Tensor, theta: float, d_rotated: int) -> Tensor:
    """The library's two steps in one: angles, then `apply_rope`; (B, H, T, h) to the same.

    Module 05."""
    angles = positions.float().unsqueeze(-1) * inverse_frequencies(d_rotated, theta).float()
    return apply_rope(x, angles.cos(), angles.sin())


def rope_cases() -> list[Case]:
    sizes = dict(B=2, H=3, T=5, h=10)
    places = torch.tensor([7, 0, 3, 12, 40])
    whole = dict(x=normal(1, 2, 3, 5, 10), positions=torch.arange(5), theta=500.0, d_rotated=10)
    part = dict(x=normal(2, 2, 3, 5, 10), positions=places, theta=500.0, d_rotated=6)
    late = dict(part, x=normal(3, 2, 3, 5, 10), positions=places + 1000, theta=20000.0)
    return [
        Case("the whole head at positions 0 to 4", sizes, whole),
        Case("6 of 10 channels at positions 7, 0, 3, 12, 40", sizes, part),
        Case("6 of 10 channels beyond position 1000", sizes, late),
    ]


def run_rope(attempt, x: Tensor, positions: Tensor, theta: float, d_rotated: int) -> dict:
    def turn(x, positions):
        return named(attempt(x, positions, theta, d_rotated), "turned")["turned"]

    turned = turn(x, positions)
    moved = turn(x.clone(), positions + 17)
    half = turn(x.bfloat16(), positions)
    outputs = {"turned": turned, "dtype of bfloat16 heads after turning": str(half.dtype)}
    if turned.shape == moved.shape == half.shape == x.shape:
        outputs |= {
            "scores": turned @ turned.transpose(-2, -1),
            "scores 17 positions later": moved @ moved.transpose(-2, -1),
            "bfloat16 heads are turned to within 0.1": bool(
                (half.float() - turned.detach()).abs().max() < 0.1
            ),
        }
    return outputs


def keeps_length(outputs: dict, case: Case) -> bool:
    return same(outputs["turned"].norm(dim=-1), case.inputs["x"].norm(dim=-1), 1e-4)


def depends_on_distance(outputs: dict, case: Case) -> bool:
    return same(outputs["scores"], outputs["scores 17 positions later"], 2e-3)


def rope_by(
    frequencies=inverse_frequencies,
    place=lambda positions, x: positions.float(),
    pair=lambda x, cos, sin: apply_rope(x, cos, sin),
    width=lambda d_rotated, x: d_rotated,
):
    """The reference with some of its steps exchanged: how the mistakes below are made."""

    def turn(x, positions, theta, d_rotated):
        r = width(d_rotated, x)
        angles = place(positions, x).unsqueeze(-1) * frequencies(r, theta).float()
        return pair(x, angles.cos(), angles.sin())

    return turn


def halves(x: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
    return x[..., : r // 2], x[..., r // 2 : r], x[..., r:]


def rejoined(turn_pair):
    """A pairing step from turn_pair(a, b, cos, sin) -> (a, b)."""

    def pair(x, cos, sin):
        a, b, rest = halves(x, 2 * cos.shape[-1])
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        return torch.cat((*turn_pair(a, b, cos, sin), rest), dim=-1)

    return pair


def by_complex_numbers(x, positions, theta, d_rotated):
    """Right: a + ib times e^(i angle)."""
    a, b, rest = halves(x.float(), d_rotated)
    angles = positions.float()[:, None] * inverse_frequencies(d_rotated, theta).float()
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag, rest), dim=-1).to(x.dtype)


def by_doubled_tables(x, positions, theta, d_rotated):
    """Right: the form of Hugging Face, x cos + (-b, a) sin with each table written twice."""
    angles = positions.float()[:, None] * inverse_frequencies(d_rotated, theta).float()
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    a, b, rest = halves(x, d_rotated)
    turned = x[..., :d_rotated] * cos + torch.cat((-b, a), dim=-1) * sin
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def by_matrices(x, positions, theta, d_rotated):
    """Right: one (h, h) rotation matrix for each token, in float64."""
    freq, r = inverse_frequencies(d_rotated, theta), d_rotated // 2
    turned = []
    for position, token in zip(positions.tolist(), x.double().unbind(-2), strict=True):
        matrix = torch.eye(x.shape[-1], dtype=torch.float64)
        for i, w in enumerate(freq.tolist()):
            c, s = math.cos(position * w), math.sin(position * w)
            matrix[i, i], matrix[i, i + r], matrix[i + r, i], matrix[i + r, i + r] = c, s, -s, c
        turned.append(token @ matrix)
    return torch.stack(turned, dim=-2).to(x.dtype)


def mixed_layouts(x, cos, sin):
    a, b, rest = halves(x, 2 * cos.shape[-1])
    cos, sin = (t.repeat_interleave(2, dim=-1).to(x.dtype) for t in (cos, sin))
    turned = torch.cat((a, b), dim=-1) * cos + torch.cat((-b, a), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1)


def paired_across_the_head(x, cos, sin):
    r, middle = cos.shape[-1], x.shape[-1] // 2
    cos, sin, out = cos.to(x.dtype), sin.to(x.dtype), x.clone()
    a, b = x[..., :r], x[..., middle : middle + r]
    out[..., :r], out[..., middle : middle + r] = a * cos - b * sin, b * cos + a * sin
    return out


def in_place(x, cos, sin):
    a, b, _ = halves(x, 2 * cos.shape[-1])
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    x[..., : turned.shape[-1]] = turned
    return x


def frequencies_of_the_head(x, positions, theta, d_rotated):
    freq = inverse_frequencies(x.shape[-1], theta)[: d_rotated // 2].float()
    angles = positions.float()[:, None] * freq
    return apply_rope(x, angles.cos(), angles.sin())


def by_heads(x, positions, theta, d_rotated):
    angles = torch.arange(x.shape[1])[:, None] * inverse_frequencies(d_rotated, theta).float()
    turned = apply_rope(x.transpose(1, 2), angles.cos(), angles.sin())
    return turned.transpose(1, 2)


ROPE_MISTAKES = (
    Mistake(
        "interleaved",
        "channels (2i, 2i + 1) are turned together, the other layout; here pair i is channels i "
        "and i + d_rotated / 2, and weights trained for one layout do not fit the other",
        rope_by(pair=lambda x, cos, sin: apply_rope(x, cos, sin, "interleaved")),
    ),
    Mistake(
        "backwards",
        "it turns the wrong way: a pair goes to (a cos - b sin, b cos + a sin). Scores still "
        "depend on distance alone, so only values tell",
        rope_by(pair=lambda x, cos, sin: apply_rope(x, cos, -sin)),
    ),
    Mistake(
        "positions ignored",
        "tokens are turned by their index in this call, and `positions` is not used: after cached "
        "tokens every chunk would start at 0 again",
        rope_by(place=lambda positions, x: torch.arange(len(positions)).float()),
        rope_by(place=lambda positions, x: (positions - positions[0]).float()),
    ),
    Mistake(
        "one too far",
        "every token is turned one position too far: position 0 is not turned at all",
        rope_by(place=lambda positions, x: positions.float() + 1),
    ),
    Mistake(
        "half the exponent",
        "the exponent is i / d_rotated; pair i covers two channels, so it is 2i / d_rotated, and "
        "the slowest pair comes near to 1 / theta",
        rope_by(frequencies=lambda d, theta: inverse_frequencies(d, theta).sqrt()),
    ),
    Mistake(
        "fixed base",
        "the base is 10000 whatever theta is",
        rope_by(frequencies=lambda d, theta: inverse_frequencies(d, 10000.0)),
    ),
    Mistake(
        "growing",
        "the frequencies grow from pair to pair: the exponent's minus sign is missing",
        rope_by(frequencies=lambda d, theta: 1 / inverse_frequencies(d, theta)),
    ),
    Mistake(
        "turns not radians",
        "the angles are 2 pi too large: theta^(-2i / d_rotated) already is in radians a position",
        rope_by(frequencies=lambda d, theta: 2 * math.pi * inverse_frequencies(d, theta)),
    ),
    Mistake(
        "no rotation",
        "both halves get the same sign of sin, which is no rotation: lengths change",
        rope_by(pair=rejoined(lambda a, b, c, s: (a * c - b * s, b * c - a * s))),
        rope_by(pair=rejoined(lambda a, b, c, s: (a * c + b * s, b * c + a * s))),
    ),
    Mistake(
        "mixed layouts",
        "the tables are written for pairs (2i, 2i + 1), each value twice in a row, but the halves "
        "are turned: use one layout in both, here table and table again",
        rope_by(pair=mixed_layouts),
    ),
    Mistake(
        "heads not tokens",
        "the angle depends on the head, not on the token: the tokens stand on axis -2",
        by_heads,
    ),
    Mistake(
        "frequencies of the head",
        "the frequencies span the whole head of h channels; in partial RoPE the ladder spans the "
        "d_rotated channels that turn",
        frequencies_of_the_head,
    ),
    Mistake(
        "paired across the head",
        "pair i is made of channels i and i + h / 2; it is i + d_rotated / 2, inside the part that "
        "turns",
        rope_by(pair=paired_across_the_head),
    ),
    Mistake(
        "rest dropped",
        "the channels from d_rotated on are missing: they pass unchanged, and the shape stays",
        rope_by(pair=lambda x, cos, sin: apply_rope(x, cos, sin)[..., : 2 * cos.shape[-1]]),
    ),
    Mistake(
        "all turned",
        "d_rotated is not used: the whole head is turned",
        rope_by(width=lambda d_rotated, x: x.shape[-1]),
    ),
    Mistake(
        "low precision",
        "positions or angles take the dtype of x: bfloat16 counts in steps of 8 at position 1000. "
        "Compute angles in float32, cast cos and sin last",
        rope_by(place=lambda positions, x: positions.to(x.dtype).float()),
        rope_by(place=lambda positions, x: positions.to(x.dtype)),
    ),
    Mistake(
        "in place",
        "it writes into x itself, which the caller still needs: build a new tensor",
        rope_by(pair=in_place),
    ),
)  # fmt: skip

ROTATE_HEADS = Exercise(
    name="rotate_heads",
    module="05",
    prompt="Turn the first d_rotated channels of each head by the positions of its tokens.",
    signature=("x", "positions", "theta", "d_rotated"),
    reference=rope,
    stub=ROPE_STUB,
    make_cases=rope_cases,
    run=run_rope,
    axes={"turned": "B H T h", "scores": "B H T T", "scores 17 positions later": "B H T T"},
    properties={
        "a token keeps its length": keeps_length,
        "a score depends on the distance alone": depends_on_distance,
    },
    equivalents={
        "complex numbers": by_complex_numbers,
        "doubled tables": by_doubled_tables,
        "matrices": by_matrices,
    },
    mistakes=ROPE_MISTAKES,
    tolerance=1e-4,
)


# yarn_frequencies: frequencies for a context that is `factor` times as long

YARN_STUB = '''\
def my_yarn(d, theta, factor, original_length, beta_fast, beta_slow):
    """Frequencies (d/2,) after YaRN's scaling, in radians a position."""
    # 1. The plain frequencies theta^(-2i / d).
    # 2. Which pair i turns `turns` times within original_length? Solve
    #    original_length * theta^(-2i / d) / (2 pi) = turns for i, for beta_fast and beta_slow.
    # 3. Round outwards: the first down, the second up, and stay within 0 .. d - 1.
    # 4. A ramp over the pairs: 0 up to the first, 1 from the second on, linear between.
    # 5. Where the ramp is 0 keep the frequency, where it is 1 divide it by factor, else mix.
    ...


my_yarn = check("yarn_frequencies", my_yarn).use
'''


def yarn(d, theta, factor, original_length, beta_fast, beta_slow) -> Tensor:
    """The library's frequencies for Rope(scaling=YaRN(...)); (d/2,). Module 05."""
    scaling = YaRN(factor, original_length, beta_fast, beta_slow)
    return scaled_frequencies(Rope(scaling=scaling), d, theta)


def yarn_cases() -> list[Case]:
    def case(label, d, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
        given = dict(d=d, theta=theta, factor=factor, original_length=original_length)
        given |= dict(beta_fast=beta_fast, beta_slow=beta_slow)
        return Case(label, {"pairs": d // 2}, given)

    return [
        case("d=64, theta=10000, factor 4 of 2048", 64, 1e4, 4.0, 2048),
        case("d=128, theta=500000, factor 8 of 8192", 128, 5e5, 8.0, 8192),
        case("both betas 1", 64, 5e4, 32.0, 4096, 1.0, 1.0),
        case("betas 24 and 2", 48, 2e4, 3.0, 1000, 24.0, 2.0),
    ]


def run_yarn(attempt, **given) -> dict:
    freq = named(attempt(**given), "frequencies")["frequencies"].double()
    plain = inverse_frequencies(given["d"], given["theta"])
    if freq.shape != plain.shape:
        return {"slowed down by": freq}
    # the ratio, not the frequency: a slow pair's error would be too small to see
    return {"slowed down by": plain / freq}


def between_one_and_factor(outputs: dict, case: Case) -> bool:
    slowed = outputs["slowed down by"]
    return bool((slowed > 1 - 1e-4).all() and (slowed < case.inputs["factor"] + 1e-3).all())


def slow_pairs_are_slowed_most(outputs: dict, case: Case) -> bool:
    return bool((outputs["slowed down by"].diff() > -1e-4).all())


def ends(d, theta, length, beta_fast, beta_slow, full_turn=2 * math.pi, spread=2.0):
    """The two pairs between which the ramp runs, before rounding."""
    return tuple(
        d * math.log(length / (turns * full_turn)) / (spread * math.log(theta))
        for turns in (beta_fast, beta_slow)
    )


def outwards(low: float, high: float, d: int) -> tuple[float, float]:
    return max(math.floor(low), 0), min(math.ceil(high), d - 1)


def ramp_over(d: int, low: float, high: float) -> Tensor:
    return ((torch.arange(d // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)


def mixed(freq: Tensor, ramp: Tensor, factor: float) -> Tensor:
    return freq / factor * ramp + freq * (1 - ramp)


def yarn_by(place=ends, rounded=outwards, ramp=ramp_over, mix=mixed):
    """The reference with some of its steps exchanged: how the mistakes below are made."""

    def frequencies(d, theta, factor, original_length, beta_fast, beta_slow):
        low, high = rounded(*place(d, theta, original_length, beta_fast, beta_slow), d)
        return mix(inverse_frequencies(d, theta), ramp(d, low, high), factor)

    return frequencies


def in_numpy_style(d, theta, factor, original_length, beta_fast, beta_slow):
    """Right: wavelengths instead of turns, and the mix as one lerp."""
    freq = theta ** (-2.0 * torch.arange(d // 2, dtype=torch.float64) / d)
    low = math.floor(d / 2 * math.log(original_length / beta_fast / 2 / math.pi, theta))
    high = math.ceil(d / 2 * math.log(original_length / beta_slow / 2 / math.pi, theta))
    low, high = max(low, 0), min(high, d - 1)
    share = torch.tensor([min(max((i - low) / (high - low), 0), 1) for i in range(d // 2)])
    return torch.lerp(freq, freq / factor, share.double())


def pair_by_pair(d, theta, factor, original_length, beta_fast, beta_slow):
    """Right: float32, one pair after the other."""
    low, high = outwards(*ends(d, theta, original_length, beta_fast, beta_slow), d)
    found = []
    for i in range(d // 2):
        freq = theta ** (-2 * i / d)
        slow = 0.0 if i <= low else 1.0 if i >= high else (i - low) / (high - low)
        found.append(freq * (1 - slow + slow / factor))
    return torch.tensor(found)


def ramp_over_turns(d, theta, factor, original_length, beta_fast, beta_slow):
    freq = inverse_frequencies(d, theta)
    turns = original_length * freq / (2 * math.pi)
    kept = ((turns - beta_slow) / max(beta_fast - beta_slow, 1e-3)).clamp(0, 1)
    return mixed(freq, 1 - kept, factor)


def extended_length(d, theta, factor, original_length, beta_fast, beta_slow):
    return yarn(d, theta, factor, factor * original_length, beta_fast, beta_slow)


def ntk(d, theta, factor, original_length, beta_fast, beta_slow):
    return inverse_frequencies(d, theta * factor ** (d / (d - 2)))


YARN_MISTAKES = (
    Mistake(
        "unscaled",
        "these are the plain frequencies: the ramp is computed but not used. A short prompt would "
        "not show it",
        yarn_by(mix=lambda freq, ramp, factor: freq),
    ),
    Mistake(
        "all divided",
        "every frequency is divided by factor: that is position interpolation. YaRN keeps the "
        "pairs that turn often, which tell neighbours apart",
        yarn_by(mix=lambda freq, ramp, factor: freq / factor),
    ),
    Mistake(
        "reversed",
        "the ramp runs the wrong way: fast pairs are divided and slow ones kept",
        yarn_by(mix=lambda freq, ramp, factor: mixed(freq, 1 - ramp, factor)),
    ),
    Mistake(
        "multiplied",
        "slow frequencies are multiplied by factor: they must fall, so that a longer context "
        "turns them no further",
        yarn_by(mix=lambda freq, ramp, factor: mixed(freq, ramp, 1 / factor)),
    ),
    Mistake(
        "unclamped",
        "the ramp goes below 0 and above 1: clamp it, or fast pairs speed up",
        yarn_by(ramp=lambda d, low, high: (torch.arange(d // 2) - low) / (high - low)),
    ),
    Mistake(
        "unrounded",
        "the ends of the ramp are not rounded outwards to whole pairs (gpt-oss leaves them so, "
        "truncate=False; here they are rounded)",
        yarn_by(rounded=lambda low, high, d: (max(low, 0), min(high, d - 1))),
    ),
    Mistake(
        "rounded inwards",
        "the ends are rounded to the nearest pair or inwards; the first goes down, the second up",
        yarn_by(rounded=lambda low, high, d: (max(math.ceil(low), 0), min(math.floor(high), d))),
        yarn_by(rounded=lambda low, high, d: (max(round(low), 0), min(round(high), d - 1))),
    ),
    Mistake(
        "radians as turns",
        "2 pi is missing: a pair turns original_length * frequency / (2 pi) times",
        yarn_by(place=lambda *given: ends(*given, full_turn=1.0)),
    ),
    Mistake(
        "channels as pairs",
        "the ends are twice too large: theta^(-2i / d) solved for i leaves a 2 below the line",
        yarn_by(place=lambda *given: ends(*given, spread=1.0)),
    ),
    Mistake(
        "betas fixed",
        "beta_fast and beta_slow are not used, but 32 and 1: Kimi K2 sets both to 1",
        lambda d, theta, factor, original_length, beta_fast, beta_slow: yarn(
            d, theta, factor, original_length, 32.0, 1.0
        ),
    ),
    Mistake(
        "extended length",
        "turns are counted within factor * original_length; what counts is what the model saw in "
        "training, original_length",
        extended_length,
    ),
    Mistake(
        "ramp over turns",
        "the ramp is linear in turns, as in Llama 3; YaRN's is linear in the pair's index",
        ramp_over_turns,
    ),
    Mistake(
        "wavelengths mixed",
        "wavelengths are mixed, not frequencies: 1 / (1 - ramp + ramp * factor) is not "
        "1 - ramp + ramp / factor",
        yarn_by(mix=lambda freq, ramp, factor: freq / (1 - ramp + ramp * factor)),
    ),
    Mistake(
        "hard switch",
        "pairs are either kept or divided: between the ends the two are mixed",
        yarn_by(ramp=lambda d, low, high: (torch.arange(d // 2) >= high).double()),
        yarn_by(ramp=lambda d, low, high: (torch.arange(d // 2) > low).double()),
    ),
    Mistake(
        "larger base",
        "the base is enlarged: that is NTK-aware scaling, another rule",
        ntk,
    ),
)  # fmt: skip

YARN_FREQUENCIES = Exercise(
    name="yarn_frequencies",
    module="05",
    prompt="Slow each pair of RoPE down by YaRN's rule.",
    signature=("d", "theta", "factor", "original_length", "beta_fast", "beta_slow"),
    reference=yarn,
    stub=YARN_STUB,
    make_cases=yarn_cases,
    run=run_yarn,
    axes={"slowed down by": "pairs"},
    properties={
        "no pair is sped up, and none is slowed by more than factor": between_one_and_factor,
        "a slower pair is never slowed less than a faster one": slow_pairs_are_slowed_most,
    },
    equivalents={"a lerp": in_numpy_style, "pair by pair": pair_by_pair},
    mistakes=YARN_MISTAKES,
    tolerance=1e-4,
)
