"""Published models as facts: every size, where it was read, and how sure we are of it.

A row uses the field names of `Config`; None means that the size is not known here. What the
library's decoder lacks stands in the row too, so that weights are counted as published.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from course_lib.model import GQA, MLA, Config, Router
from course_lib.model.checks import require
from course_lib.model.position import Rope

from .counts import ParameterCount, count_parameters

TAGS = {
    "config": "read in the published configuration, or in the vendor's implementation",
    "recalled": "at least one size was not read in the configuration; the note says which",
    "article": "read in Sebastian Raschka's architecture comparison, state of 2 April 2026",
}
BIASES = ("qkv", "out", "experts", "router")
PLAIN = GQA(qk_norm=False)


@dataclass(frozen=True)
class CachedLayers:
    """`n` layers, in each of which a token leaves `values` numbers; with a window (or a chunk)
    only the last `window` tokens are needed. Module 09."""

    n: int
    values: int
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published model; total and active as its makers round them, in billions. Module 12."""

    name: str
    n_layers: int
    d_model: int
    vocab_size: int | None = None
    tied: bool = False
    # attention
    attention: GQA | MLA | None = PLAIN
    n_heads: int | None = None
    n_kv_heads: int | None = None
    d_head: int | None = None  # None with MLA, whose widths stand in `attention`
    flat_qk_norm: bool = False  # one gain for each channel of all heads, not of one head
    rope_theta: float | None = None
    layers: tuple[CachedLayers, ...] = ()  # what is cached, where layers are not all alike
    # feed-forward
    d_ff: int | None = None  # dense layers
    n_experts: int = 0  # 0: a dense model
    n_experts_active: int = 0
    n_shared_experts: int | None = 0
    d_expert: int | None = None
    d_shared: int | None = None  # all shared experts together, where it is not the routed width
    shared_gate: bool = False  # a sigmoid of one logit scales the shared expert
    first_k_dense: int | None = 0
    moe_every: int = 1  # 2: every second layer routes
    router: Router | None = None
    biases: tuple[str, ...] = ()
    # what is published about it
    total: float | None = None
    active: float | None = None
    beyond: str = ""  # what no Config says; such a model is not counted
    note: str = ""
    tag: str = "config"

    def __post_init__(self):
        unknown = [bias for bias in self.biases if bias not in BIASES]
        require(not unknown, f"biases={self.biases}: {unknown} is unknown.", f"Use {BIASES}.")
        require(self.tag in TAGS, f"tag={self.tag!r} is unknown.", f"Use {tuple(TAGS)}.")

    @property
    def n_dense(self) -> int:
        """Layers without experts."""
        if not self.n_experts:
            return self.n_layers
        if self.moe_every > 1:
            return self.n_layers - self.n_layers // self.moe_every
        return self.first_k_dense or 0

    def config(self) -> Config:
        """The decoder of this size, dense layers first.

        Raises ValueError for a model that no Config describes. Module 12."""
        require(
            not self.beyond,
            f"{self.name}: {self.beyond}.",
            f"Choose one of {', '.join(m.name for m in counted())}.",
        )
        experts = dict(
            n_experts=self.n_experts,
            n_experts_active=self.n_experts_active or 1,
            n_shared_experts=0 if self.d_shared else self.n_shared_experts,
            d_expert=self.d_expert or 1,
        )
        return Config(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads or self.n_heads,
            d_head=self.d_head or self.attention.d_nope,
            d_ff=self.d_ff or 1,
            first_k_dense=self.n_dense,
            rope_theta=self.rope_theta,
            attention=self.attention,
            position=Rope(),
            router=self.router or Router(),
            tied=self.tied,
            **experts,
        )


def cached_layers(model: Published) -> tuple[CachedLayers, ...]:
    """What each token leaves in the layers of a published model.

    Raises ValueError for a model whose attention is not known here. Module 09."""
    if model.layers:
        return model.layers
    if isinstance(model.attention, MLA):
        values = model.attention.kv_lora_rank + model.attention.d_rope
    else:
        require(
            model.n_kv_heads and model.d_head,
            f"{model.name}: its key/value heads are not known here.",
            f"Choose one of {', '.join(m.name for m in cached())}.",
        )
        values = kv(model.n_kv_heads, model.d_head)
    return (CachedLayers(model.n_layers, values),)


def published_cache_bytes(
    model: Published, tokens: int, batch: int = 1, bits: int = 16, windows: bool = True
) -> int:
    """batch * sum over layers of values * tokens kept * bits / 8, rounded up to whole bytes.

    windows=False keeps all tokens in every layer. State of a fixed size (linear attention,
    Mamba) is not in it. Raises ValueError for a model without known layers. Module 09."""
    kept = [
        layer.n * layer.values * min(tokens, layer.window or tokens if windows else tokens)
        for layer in cached_layers(model)
    ]
    return -(-batch * sum(kept) * bits // 8)


def kv(n_kv_heads: int, d_key: int, d_value: int | None = None) -> int:
    """Numbers that a token leaves in a layer: a key and a value for each key/value head."""
    return n_kv_heads * (d_key + (d_key if d_value is None else d_value))


def more_attention(model: Published) -> int:
    """Weights of one attention layer that the library's has not: biases and wide norms."""
    more = 0
    if "qkv" in model.biases:
        more += (model.n_heads + 2 * model.n_kv_heads) * model.d_head
    if "out" in model.biases:
        more += model.d_model
    if model.flat_qk_norm:
        more += (model.n_heads + model.n_kv_heads) * model.d_head
    return more


def bias_of_expert(model: Published) -> int:
    """Biases of gate, up and down of one expert."""
    return 2 * model.d_expert + model.d_model if "experts" in model.biases else 0


def count_published(model: Published) -> ParameterCount:
    """Every weight of a published model by role; selection biases are buffers, not weights.

    Raises ValueError for a model that no Config describes. Module 12."""
    count, moe = count_parameters(model.config()), model.n_layers - model.n_dense
    bias, shared = bias_of_expert(model), count.shared
    if model.d_shared:
        shared = moe * (3 * model.d_model * model.d_shared + model.shared_gate * model.d_model)
    return replace(
        count,
        attention=count.attention + model.n_layers * more_attention(model),
        router=count.router + moe * model.n_experts * ("router" in model.biases),
        routed=count.routed + moe * model.n_experts * bias,
        routed_active=count.routed_active + moe * model.n_experts_active * bias,
        shared=shared,
    )


def latent(q_rank: int) -> MLA:
    """The attention of DeepSeek-V2, V3 and their kin."""
    return MLA(kv_lora_rank=512, d_rope=64, d_nope=128, d_value=128, q_lora_rank=q_rank)


NORMED = GQA(qk_norm=True)
ALL = Router("softmax_all")
RENORMALIZED = Router("softmax_renormalized")
DEEPSEEK = Router("sigmoid", selection_bias=True, n_groups=8, n_groups_active=4, scaling=2.5)
BIASED = Router("sigmoid", selection_bias=True)

MODELS = (
    Published(name="Llama-3.2-1B", n_layers=16, d_model=2048, vocab_size=128256, tied=True,
              n_heads=32, n_kv_heads=8, d_head=64, rope_theta=5e5, d_ff=8192, total=1.24),
    Published(name="Llama-3-8B", n_layers=32, d_model=4096, vocab_size=128256,
              n_heads=32, n_kv_heads=8, d_head=128, rope_theta=5e5, d_ff=14336, total=8),
    Published(name="Llama-3-70B", n_layers=80, d_model=8192, vocab_size=128256,
              n_heads=64, n_kv_heads=8, d_head=128, rope_theta=5e5, d_ff=28672, total=70),
    Published(name="Llama-3.1-405B", n_layers=126, d_model=16384, vocab_size=128256,
              n_heads=128, n_kv_heads=8, d_head=128, rope_theta=5e5, d_ff=53248, total=405),
    Published(name="Mistral-7B-v0.1", n_layers=32, d_model=4096, vocab_size=32000,
              n_heads=32, n_kv_heads=8, d_head=128, rope_theta=1e4, d_ff=14336, total=7),
    Published(name="Qwen3-0.6B", n_layers=28, d_model=1024, vocab_size=151936, tied=True,
              attention=NORMED, n_heads=16, n_kv_heads=8, d_head=128, rope_theta=1e6, d_ff=3072,
              total=0.6),
    Published(name="Qwen3-8B", n_layers=36, d_model=4096, vocab_size=151936,
              attention=NORMED, n_heads=32, n_kv_heads=8, d_head=128, rope_theta=1e6, d_ff=12288,
              total=8.2),
    Published(name="Mixtral-8x7B", n_layers=32, d_model=4096, vocab_size=32000,
              n_heads=32, n_kv_heads=8, d_head=128, rope_theta=1e6,
              n_experts=8, n_experts_active=2, d_expert=14336, total=47, active=13),
    Published(name="Mixtral-8x22B", n_layers=56, d_model=6144, vocab_size=32000,
              n_heads=48, n_kv_heads=8, d_head=128, rope_theta=1e6,
              n_experts=8, n_experts_active=2, d_expert=16384, total=141, active=39),
    Published(name="Qwen1.5-MoE-A2.7B", n_layers=24, d_model=2048, vocab_size=151936,
              n_heads=16, n_kv_heads=16, d_head=128, rope_theta=1e6, biases=("qkv",), router=ALL,
              n_experts=60, n_experts_active=4, n_shared_experts=1, d_expert=1408, d_shared=5632,
              shared_gate=True, total=14.3, active=2.7),
    Published(name="OLMoE-1B-7B", n_layers=16, d_model=2048, vocab_size=50304,
              n_heads=16, n_kv_heads=16, d_head=128, flat_qk_norm=True, rope_theta=1e4, router=ALL,
              n_experts=64, n_experts_active=8, d_expert=1024, total=6.9, active=1.3),
    Published(name="DeepSeek-V2", n_layers=60, d_model=5120, vocab_size=102400,
              attention=latent(1536), n_heads=128, rope_theta=1e4, d_ff=12288, router=ALL,
              n_experts=160, n_experts_active=6, n_shared_experts=2, d_expert=1536, first_k_dense=1,
              total=236, active=21),
    Published(name="DeepSeek-V3", n_layers=61, d_model=7168, vocab_size=129280,
              attention=latent(1536), n_heads=128, rope_theta=1e4, d_ff=18432, router=DEEPSEEK,
              n_experts=256, n_experts_active=8, n_shared_experts=1, d_expert=2048, first_k_dense=3,
              total=671, active=37, note="without the module that predicts a second token"),
    Published(name="Kimi-K2", n_layers=61, d_model=7168, vocab_size=163840,
              attention=latent(1536), n_heads=64, rope_theta=5e4, d_ff=18432, router=BIASED,
              n_experts=384, n_experts_active=8, n_shared_experts=1, d_expert=2048, first_k_dense=1,
              total=1000, active=32, tag="recalled", note="vocabulary recalled"),
    Published(name="GLM-4.5", n_layers=92, d_model=5120, vocab_size=151552,
              attention=NORMED, n_heads=96, n_kv_heads=8, d_head=128, rope_theta=1e6, d_ff=12288,
              biases=("qkv",), router=BIASED, n_experts=160, n_experts_active=8,
              n_shared_experts=1, d_expert=1536, first_k_dense=3, total=355, active=32,
              tag="recalled",
              note="dense width recalled; without the module that predicts a second token"),
    Published(name="dots.llm1", n_layers=62, d_model=4096, vocab_size=152064,
              attention=NORMED, n_heads=32, n_kv_heads=32, d_head=128, rope_theta=1e7, d_ff=10944,
              router=BIASED, n_experts=128, n_experts_active=6, n_shared_experts=2, d_expert=1408,
              first_k_dense=1, total=142, active=14),
    Published(name="Qwen3-30B-A3B", n_layers=48, d_model=2048, vocab_size=151936,
              attention=NORMED, n_heads=32, n_kv_heads=4, d_head=128, rope_theta=1e6,
              router=RENORMALIZED, n_experts=128, n_experts_active=8, d_expert=768,
              total=30.5, active=3.3),
    Published(name="Qwen3-235B-A22B", n_layers=94, d_model=4096, vocab_size=151936,
              attention=NORMED, n_heads=64, n_kv_heads=4, d_head=128, rope_theta=1e6,
              router=RENORMALIZED, n_experts=128, n_experts_active=8, d_expert=1536,
              total=235, active=22),
    Published(name="gpt-oss-20b", n_layers=24, d_model=2880, vocab_size=201088,
              attention=GQA(qk_norm=False, sinks=True), n_heads=64, n_kv_heads=8, d_head=64,
              layers=(CachedLayers(12, kv(8, 64), 128), CachedLayers(12, kv(8, 64))),
              rope_theta=1.5e5, biases=BIASES, n_experts=32, n_experts_active=4, d_expert=2880,
              total=21, active=3.6, tag="recalled", note="vocabulary recalled"),
    Published(name="gpt-oss-120b", n_layers=36, d_model=2880, vocab_size=201088,
              attention=GQA(qk_norm=False, sinks=True), n_heads=64, n_kv_heads=8, d_head=64,
              layers=(CachedLayers(18, kv(8, 64), 128), CachedLayers(18, kv(8, 64))),
              rope_theta=1.5e5, biases=BIASES, n_experts=128, n_experts_active=4, d_expert=2880,
              total=117, active=5.1, tag="recalled", note="vocabulary recalled"),
    Published(name="Llama-4-Maverick", n_layers=48, d_model=5120, vocab_size=202048,
              n_heads=40, n_kv_heads=8, d_head=128, rope_theta=5e5, d_ff=16384,
              layers=(CachedLayers(36, kv(8, 128), 8192), CachedLayers(12, kv(8, 128))),
              router=Router("sigmoid", normalize=False), n_experts=128, n_experts_active=1,
              n_shared_experts=1, d_expert=8192, moe_every=2, total=400, active=17,
              note="the weight multiplies the expert's input"),
    Published(name="MiniMax-M2", n_layers=62, d_model=3072, vocab_size=200064,
              n_heads=48, n_kv_heads=8, d_head=128, flat_qk_norm=True, rope_theta=5e6,
              router=BIASED, n_experts=256, n_experts_active=8, d_expert=1536,
              total=230, active=10, tag="recalled", note="expert width and vocabulary recalled"),
    Published(name="GLM-5", n_layers=78, d_model=6144,
              attention=MLA(kv_lora_rank=512, d_rope=64, d_nope=192, d_value=256, q_lora_rank=2048),
              n_heads=64, rope_theta=1e6, d_ff=12288, router=BIASED, n_experts=256,
              n_experts_active=8, n_shared_experts=1, d_expert=2048, first_k_dense=3,
              total=744, active=40, beyond="an indexer chooses what attention reads"),
    Published(name="Qwen3-Next-80B-A3B", n_layers=48, d_model=2048, vocab_size=151936,
              attention=None, n_heads=16, n_kv_heads=2, d_head=256,
              layers=(CachedLayers(12, kv(2, 256)),), rope_theta=1e7, router=RENORMALIZED,
              n_experts=512, n_experts_active=10, n_shared_experts=1, d_expert=512,
              total=80, active=3,
              beyond="three of four layers have linear attention"),
    Published(name="Mistral-Large-3", n_layers=61, d_model=7168, attention=latent(1536),
              n_heads=128, rope_theta=1e4, n_experts=128, n_experts_active=4, n_shared_experts=1,
              d_expert=4096, first_k_dense=3, total=673, active=39,
              beyond="its vocabulary and dense width are not known here"),
    Published(name="Trinity-Large", n_layers=60, d_model=3072, attention=None, n_heads=48,
              n_kv_heads=8, d_head=128,
              layers=(CachedLayers(45, kv(8, 128), 4096), CachedLayers(15, kv(8, 128))),
              n_experts=256, n_experts_active=4, n_shared_experts=1,
              d_expert=3072, first_k_dense=6, total=400, active=13,
              beyond="its vocabulary and dense width are not known here"),
    Published(name="MiMo-V2-Flash", n_layers=48, d_model=4096, attention=None, n_heads=64,
              rope_theta=5e6, n_experts=256, n_experts_active=8, d_expert=2048, first_k_dense=1,
              total=309, active=15, beyond="local layers have other heads than global ones"),
    Published(name="Nemotron-3-Nano", n_layers=52, d_model=2688, attention=None, n_heads=32,
              n_kv_heads=2, d_head=128, layers=(CachedLayers(6, kv(2, 128)),), n_experts=128,
              n_experts_active=6, n_shared_experts=1, d_expert=1856, d_shared=3712,
              first_k_dense=None, total=30, active=3.5,
              beyond="23 of its layers are Mamba, 23 experts without a gate, 6 attention"),
    Published(name="Kimi-Linear-48B", n_layers=27, d_model=2304, attention=None, n_heads=32,
              layers=(CachedLayers(7, 512 + 64),), n_experts=256,
              n_experts_active=8, n_shared_experts=1, d_expert=1024, first_k_dense=1,
              total=48, active=3, beyond="20 of its 27 layers have linear attention"),
    Published(name="Gemma-4-26B-A4B", n_layers=30, d_model=2816, vocab_size=262144, attention=None,
              n_heads=16,
              layers=(CachedLayers(25, kv(8, 256), 1024), CachedLayers(5, kv(2, 512))),
              n_experts=128, n_experts_active=8, n_shared_experts=1, d_expert=704, d_shared=None,
              first_k_dense=None, total=26, active=4,
              beyond="local and global layers have other heads",
              note="the shared path is an always-on MLP"),
    Published(name="Grok-2", n_layers=64, d_model=8192, attention=None, n_heads=64, n_kv_heads=8,
              d_head=128, rope_theta=208533496.0, n_experts=8, n_experts_active=2,
              n_shared_experts=None, d_expert=16384, first_k_dense=None, total=270, tag="article",
              beyond="a residual path beside the experts is not described", note="sizes of a file"),
    Published(name="SmolLM2-135M", n_layers=30, d_model=576, vocab_size=49152, tied=True,
              n_heads=9, n_kv_heads=3, d_head=64, rope_theta=1e5, d_ff=1536, total=0.135),
    Published(name="Qwen3-1.7B", n_layers=28, d_model=2048, vocab_size=151936, tied=True,
              attention=NORMED, n_heads=16, n_kv_heads=8, d_head=128, rope_theta=1e6, d_ff=6144,
              total=1.7),
    Published(name="Qwen3-4B", n_layers=36, d_model=2560, vocab_size=151936, tied=True,
              attention=NORMED, n_heads=32, n_kv_heads=8, d_head=128, rope_theta=1e6, d_ff=9728,
              total=4.0),
    Published(name="Qwen3-14B", n_layers=40, d_model=5120, vocab_size=151936,
              attention=NORMED, n_heads=40, n_kv_heads=8, d_head=128, rope_theta=1e6, d_ff=17408,
              total=14.8),
    Published(name="Qwen3-32B", n_layers=64, d_model=5120, vocab_size=151936,
              attention=NORMED, n_heads=64, n_kv_heads=8, d_head=128, rope_theta=1e6, d_ff=25600,
              total=32.8),
    Published(name="DeepSeek-LLM-67B", n_layers=95, d_model=8192, vocab_size=102400,
              n_heads=64, n_kv_heads=8, d_head=128, rope_theta=1e4, d_ff=22016, total=67),
    Published(name="OLMo-2-7B", n_layers=32, d_model=4096, n_heads=32, n_kv_heads=32, d_head=128,
              flat_qk_norm=True, rope_theta=5e5, d_ff=11008,
              total=7, beyond="its vocabulary is not known here"),
    Published(name="Olmo-3-7B", n_layers=32, d_model=4096, n_heads=32, n_kv_heads=32, d_head=128,
              flat_qk_norm=True, rope_theta=5e5, d_ff=11008,
              layers=(CachedLayers(24, kv(32, 128), 4096), CachedLayers(8, kv(32, 128))),
              total=7, beyond="its vocabulary is not known here"),
    Published(name="Olmo-3-32B", n_layers=64, d_model=5120, n_heads=40, n_kv_heads=8, d_head=128,
              flat_qk_norm=True, rope_theta=5e5, d_ff=27648,
              layers=(CachedLayers(48, kv(8, 128), 4096), CachedLayers(16, kv(8, 128))),
              total=32, beyond="its vocabulary is not known here",
              note="sizes read in derived copies"),
    Published(name="SmolLM3-3B", n_layers=36, d_model=2048, n_heads=16, n_kv_heads=4, d_head=128,
              rope_theta=5e6, total=3, beyond="its vocabulary and dense width are not known here",
              note="every fourth layer without positions"),
    Published(name="Mistral-Small-3.1", n_layers=40, d_model=5120, n_heads=32, n_kv_heads=8,
              d_head=128, rope_theta=1e9,
              total=24, beyond="its vocabulary and dense width are not known here"),
    Published(name="Gemma-2-27B", n_layers=46, d_model=4608, n_heads=32, n_kv_heads=16, d_head=128,
              d_ff=36864,
              layers=(CachedLayers(23, kv(16, 128), 4096), CachedLayers(23, kv(16, 128))),
              total=27, beyond="a second norm after each part, and capped scores"),
    Published(name="Gemma-3-1B", n_layers=26, d_model=1152, vocab_size=262144, tied=True, n_heads=4,
              n_kv_heads=1, d_head=256, d_ff=6912, tag="recalled",
              layers=(CachedLayers(22, kv(1, 256), 512), CachedLayers(4, kv(1, 256))),
              total=1, beyond="a second norm after each part", note="window recalled"),
    Published(name="Gemma-3-27B", n_layers=62, d_model=5376, vocab_size=262144, tied=True,
              n_heads=32, n_kv_heads=16, d_head=128, d_ff=21504, tag="recalled",
              layers=(CachedLayers(52, kv(16, 128), 1024), CachedLayers(10, kv(16, 128))),
              total=27, beyond="a second norm after each part",
              note="stream and dense width recalled"),
    Published(name="Gemma-4-31B", n_layers=60, d_model=5376, vocab_size=262144, attention=None,
              n_heads=32,
              layers=(CachedLayers(50, kv(16, 256), 1024), CachedLayers(10, kv(4, 512))),
              total=31, beyond="local and global layers have other heads"),
)  # fmt: skip


def counted() -> Iterator[Published]:
    """The models whose weights `count_published` counts. Module 12."""
    return (model for model in MODELS if not model.beyond)


def cached() -> Iterator[Published]:
    """The models whose cache `published_cache_bytes` counts. Module 09."""
    return (m for m in MODELS if m.layers or isinstance(m.attention, MLA) or m.n_kv_heads)


def published(name: str) -> Published:
    """The row of that name. Raises ValueError naming those that there are. Module 12."""
    found = {model.name: model for model in MODELS}
    require(name in found, f"name={name!r} is no model here.", f"Choose from {tuple(found)}.")
    return found[name]
