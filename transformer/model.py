"""The whole Transformer out of its parts: ModelSpec, Block, Stack and the three FAMILIES.

A family is called as ``model.apply({"params": p}, text, source=None, capacity=None)`` with
`Tokens` and gives float32 logits: [B, T, V] of tokens or, where the spec has `classes`, those of
the text as a whole, [B, classes]. Dropout is on where `rngs={"dropout": key}` is given. With a
`capacity` the collection "cache" holds that many past positions (see generate.py).
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util

from transformer.layers.attention import KERNELS, MIXERS, Attention, Where, visible
from transformer.layers.base import Array, Dense, Dims, Embedding, Tokens, constrain, dropout
from transformer.layers.ffn import FFNS
from transformer.layers.mask import MASKS, always_looks_ahead, full, looks_ahead
from transformer.layers.norm import NORMS
from transformer.layers.pool import POOLS
from transformer.layers.position import POSITIONS
from transformer.layers.residual import ORDERS, PLACEMENTS
from transformer.spec import Choice, Count, Cycle, SpecError, choice, pick

PER_LAYER = ("position", "norm", "placement", "order", "mixer", "ffn")  # and the mask of a side

REMATS = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@dataclasses.dataclass(frozen=True)
class ModelSpec(Dims):
    """Everything that makes the model. Fields declared `per_layer` may be cycles over depth.

    An encoder-decoder has two sides; the encoder_... fields are its sizes where they differ, and
    the properties H, F, L and masks are those of the side in hand.
    """

    family: Literal["encoder", "decoder", "encoder_decoder"] = "decoder"
    position: Choice = choice(POSITIONS, "rope", per_layer=True)
    norm: Choice = choice(NORMS, "rms", per_layer=True)
    placement: Choice = choice(PLACEMENTS, "pre", per_layer=True)
    order: Choice = choice(ORDERS, "sequential", per_layer=True)
    mixer: Choice = choice(MIXERS, "attention", per_layer=True)
    mask: Choice | None = choice(MASKS, None, per_layer=True)  # None: decoder causal, encoder full
    ffn: Choice = choice(FFNS, "mlp", per_layer=True)
    kernel: Choice = choice(KERNELS, "einsum")
    source_vocab: Count | None = None  # of an encoder with embeddings of its own; None: shared
    tie: bool = True  # the head is the transposed embedding
    classes: Count | None = None  # of texts; None: tokens are predicted
    pool: Choice | None = choice(POOLS, None)  # a text as one vector, for `classes`; None: the mean
    # of an encoder, the last position of a decoder
    embed_scale: bool = False  # embeddings times sqrt(dim), as in the original
    scan: bool = False  # compile one period of layers and scan it over depth
    remat: Literal["none", "full", "dots"] = "none"  # recompute in the backward pass: nothing,
    # everything, or all but products with weights
    encoder_depth: Count | None = None  # None, here and below: as the decoder
    encoder_heads: Count | None = None
    encoder_ffn_dim: Count | None = None
    encoder_mask: Choice | None = choice(MASKS, None, per_layer=True)  # None: full

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        if self.family != "encoder_decoder":
            for name in ("depth", "heads", "ffn_dim", "mask"):
                if (value := getattr(self, f"encoder_{name}")) is not None:
                    yield f"encoder_{name}={value}: only family=encoder_decoder has it"
            if self.source_vocab is not None:
                yield f"source_vocab={self.source_vocab}: only family=encoder_decoder has a source"
        elif self.side == "decoder" and self.encoder_heads:
            try:
                self.of("encoder")
            except SpecError as e:
                yield from (f"in the encoder, {line}" for line in str(e).splitlines())
        if self.family != "encoder" and self.side == "decoder":
            for mask in dict.fromkeys(self.masks.entries):
                if always_looks_ahead(mask):
                    yield f"mask={mask}: lets a decoder see the tokens it is to predict"
        if isinstance(self.position, Cycle):
            for p in dict.fromkeys(self.position.entries):
                if p.factory.acts_on_embeddings:
                    yield f"position={p}: acts on the embeddings, so it cannot vary by layer"

    @property
    def L(self) -> int:
        return self.depths[self.side == "decoder"]

    @property
    def H(self) -> int:
        return self._sized("heads")

    @property
    def F(self) -> int:
        """Width of the feed-forward network, of one layer's spec."""
        return self._sized("ffn_dim") or self.ffn.at(0).factory.width(self.dim)

    @property
    def masks(self) -> Choice | Cycle:
        if self.side == "encoder":
            own = self.encoder_mask if self.family == "encoder_decoder" else self.mask
            return own or pick(MASKS, "full")
        return self.mask or pick(MASKS, "causal")

    @property
    def depths(self) -> tuple[int, int]:
        """Layers of the encoder and of the decoder."""
        if self.family == "encoder_decoder":
            return self.encoder_depth or self.depth, self.depth
        return (self.depth, 0) if self.family == "encoder" else (0, self.depth)

    @property
    def period(self) -> int:
        """After how many layers the choices repeat."""
        cycles = [getattr(self, name) for name in PER_LAYER] + [self.masks]
        return math.lcm(*(len(c.entries) for c in cycles))

    @property
    def scanned(self) -> int:
        """How many periods are scanned; the layers that remain stand on their own."""
        return self.L // self.period if self.scan else 0

    @property
    def bidirectional(self) -> bool:
        """Whether some layer of this side lets a query look ahead."""
        return any(looks_ahead(mask) for mask in self.masks.entries)

    @property
    def needs_max_len(self) -> bool:
        return any(p.factory.needs_max_len for p in self.position.entries)

    def gain(self, role: str) -> float:
        return self.placement.at(0).factory.gain(self, role)

    def layer(self, i: int) -> "ModelSpec":
        """The spec of layer i: every cycle replaced by the choice that is its turn."""
        return dataclasses.replace(self, **{n: getattr(self, n).at(i) for n in PER_LAYER})

    def of(self, side: Literal["encoder", "decoder"]) -> "ModelSpec":
        return dataclasses.replace(self, side=side)

    def build(self) -> "Transformer":
        return FAMILIES[self.family](self)

    def _sized(self, name: str) -> Any:
        own = getattr(self, f"encoder_{name}") if self.side == "encoder" else None
        return own or getattr(self, name)


class Block(nn.Module):
    """One layer: self-attention (or what stands in its place), cross-attention, feed-forward."""

    spec: ModelSpec  # of this layer
    cross: bool

    @nn.compact
    def __call__(self, x_BTD: Array, where: Where, memory_BSD: Array | None, cross: Any) -> Array:
        s = self.spec
        mix = s.mixer(s, False, name=s.mixer.name)
        sublayers = {s.mixer.name: lambda h_BTD: mix(h_BTD, h_BTD, where)}
        if self.cross:
            look = Attention(s, True, name="cross_attention")
            sublayers["cross_attention"] = lambda h_BTD: look(h_BTD, memory_BSD, cross)
        sublayers["ffn"] = s.ffn(s, name="ffn")

        def dropped(f):
            return lambda h_BTD: dropout(self, f(h_BTD), s.dropout)

        x_BTD = s.order(
            x_BTD,
            lambda name: s.placement(s, s.norm, name=f"{name}_residual"),
            {name: dropped(f) for name, f in sublayers.items()},
        )
        return constrain(x_BTD, "batch", "length", "width")


class Period(nn.Module):
    """The layers after which the choices repeat: what a scan over depth compiles once."""

    spec: ModelSpec
    cross: bool

    @nn.compact
    def __call__(self, x_BTD, places, memory_BSD, cross):
        for i, where in enumerate(places):
            block = Block(self.spec.layer(i), self.cross, name=f"block_{i}")
            x_BTD = block(x_BTD, where, memory_BSD, cross)
        return x_BTD, None


class Stack(nn.Module):
    """The layers of one side: embeddings x [B, T, D] -> x, with the final norm if one is due."""

    spec: ModelSpec  # of this side
    cross: bool = False

    @nn.compact
    def __call__(
        self,
        x_BTD: Array,
        text: Tokens,
        memory: tuple[Array, Tokens] | None = None,
        capacity: int | None = None,
    ) -> Array:
        s = self.spec
        schemes = {
            choice: choice(s, s.bidirectional, name=f"position_{i}" if i else "position")
            for i, choice in enumerate(dict.fromkeys(s.position.entries))
        }
        for scheme in schemes.values():
            x_BTD = scheme.embed(x_BTD, text.positions_BT)
        x_BTD = dropout(self, x_BTD, s.dropout)
        keys, slot = (text, None) if capacity is None else self._remembered(text, capacity)
        turns = {c: p.rotation(text.positions_BT) for c, p in schemes.items()}
        biases = {c: p.bias(text.positions_BT, keys.positions_BT) for c, p in schemes.items()}
        places = tuple(
            Where(visible(s.masks.at(i), text, keys), turns[c], biases[c], slot, capacity)
            for i in range(s.period)
            for c in [s.position.at(i)]
        )
        cross = self._across(text, memory, capacity) if self.cross else None
        x_BTD = self._layers(x_BTD, places, memory and memory[0], cross)
        last = s.layer(s.L - 1)
        return (
            last.norm(s, name="final_norm")(x_BTD) if last.placement.factory.final_norm else x_BTD
        )

    def _layers(self, x_BTD, places, memory_BSD, cross):
        s = self.spec
        if s.scanned:
            everywhere: Any = nn.broadcast
            scan = nn.scan(
                self._remat(Period),
                variable_axes={"params": 0, "cache": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=everywhere,
                length=s.scanned,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            x_BTD, _ = scan(s, self.cross, name="blocks")(x_BTD, places, memory_BSD, cross)
        for i in range(s.scanned * s.period, s.L):
            block = self._remat(Block)(s.layer(i), self.cross, name=f"block_{i}")
            x_BTD = block(x_BTD, places[i % s.period], memory_BSD, cross)
        return x_BTD

    def _remat(self, module):
        policy = REMATS[self.spec.remat]
        return (
            module
            if policy is None
            else nn.remat(module, policy=policy, prevent_cse=not self.spec.scan)
        )

    def _remembered(self, text: Tokens, capacity: int) -> tuple[Tokens, Array]:
        """Everything up to and with `text`, as keys; unwritten slots are padding."""
        slot = self.variable("cache", "slot", jnp.zeros, (), jnp.int32)
        start, kept = slot.value, {}
        new = {"segments": text.segments_BT, "positions": text.positions_BT}
        if text.shown_BT is not None or self.has_variable("cache", "shown"):
            shown = jnp.zeros(text.ids_BT.shape, bool) if text.shown_BT is None else text.shown_BT
            new["shown"] = shown
        for name, a in new.items():
            cell = self.variable("cache", name, jnp.zeros, (a.shape[0], capacity), a.dtype)
            cell.value = jax.lax.dynamic_update_slice_in_dim(cell.value, a, start, axis=1)
            kept[name] = cell.value
        slot.value = start + text.ids_BT.shape[1]
        return Tokens(kept["segments"], *kept.values()), start

    def _across(self, text: Tokens, memory, capacity: int | None) -> Where:
        """A target looks at all of the source of its own segment."""
        source = memory and memory[1]
        if capacity is not None:
            cell = self.variable("cache", "source", lambda: source)
            source = cell.value = source or cell.value
        assert source is not None, "an encoder-decoder needs a source"
        return Where(visible(full, text, source), capacity=capacity)


class Transformer(nn.Module):
    """What the families share: embedding in, logits out."""

    spec: ModelSpec

    def setup(self):
        s = self.spec
        self.embed = Embedding(s, s.V, "vocab")
        if s.classes:
            self.classifier = Dense(s, s.classes, ("embed", "classes"), "head", use_bias=True)
        elif not s.tie:
            self.head = Dense(s, s.V, ("embed", "vocab"), "head", use_bias=False)

    def read(self, text: Tokens, embed: Embedding | None = None) -> Array:
        x_BTD = (embed or self.embed)(text.ids_BT)
        if self.spec.embed_scale:
            x_BTD = x_BTD * jnp.asarray(math.sqrt(self.spec.D), x_BTD.dtype)
        return constrain(x_BTD, "batch", "length", "width")

    def write(self, x_BTD: Array, text: Tokens) -> Array:
        s = self.spec
        if s.classes:
            pool: Any = s.pool or pick(POOLS, "last" if s.depths[1] else "mean")
            x_BD = dropout(self, pool()(x_BTD, text.segments_BT > 0), s.dropout)
            return self.classifier(x_BD).astype(jnp.float32)
        logits_BTV = self.embed.attend(x_BTD) if s.tie else self.head(x_BTD)
        return constrain(logits_BTV.astype(jnp.float32), "batch", "length", "vocab")


class Encoder(Transformer):
    """BERT-like: every position is predicted from all the text it may see."""

    def setup(self):
        super().setup()
        self.encoder = Stack(self.spec.of("encoder"))

    def __call__(self, text: Tokens, source: Tokens | None = None, capacity: int | None = None):
        assert source is None and capacity is None, "an encoder has neither source nor cache"
        return self.write(self.encoder(self.read(text), text), text)


class Decoder(Transformer):
    """GPT-like: every position predicts the next."""

    def setup(self):
        super().setup()
        self.decoder = Stack(self.spec.of("decoder"))

    def __call__(self, text: Tokens, source: Tokens | None = None, capacity: int | None = None):
        assert source is None, "a decoder has no source"
        return self.write(self.decoder(self.read(text), text, capacity=capacity), text)


class EncoderDecoder(Transformer):
    """The original: the decoder also looks at the encoded source. With a cache, the source is
    given once; its keys and values are kept."""

    def setup(self):
        super().setup()
        s = self.spec
        self.source_embed = Embedding(s, s.source_vocab, "vocab") if s.source_vocab else self.embed
        self.encoder = Stack(s.of("encoder"))
        self.decoder = Stack(s.of("decoder"), cross=True)

    def __call__(self, text: Tokens, source: Tokens | None = None, capacity: int | None = None):
        memory = None
        if source is not None:
            memory = self.encoder(self.read(source, self.source_embed), source), source
        return self.write(self.decoder(self.read(text), text, memory, capacity), text)


FAMILIES = {"encoder": Encoder, "decoder": Decoder, "encoder_decoder": EncoderDecoder}


# ------------------------------------------------------------- the two layouts of parameters


def unstack(params: dict[str, Any]) -> dict[str, Any]:
    """From the scanned layout (blocks/block_j, leaves [n, ...]) to one subtree for each layer.

    Works on any nested dict with the names of the parameters, optimizer moments included.
    """
    out, slots = {}, defaultdict(set)
    flat = traverse_util.flatten_dict(params)
    for path in (p for p in flat if "blocks" in p):
        at = path.index("blocks")
        slots[path[:at]].add(path[at + 1])  # the two sides may differ in their periods
    leaf: Any
    for path, leaf in flat.items():
        if "blocks" not in path:
            out[path] = leaf
            continue
        at = path.index("blocks")
        slot, period = int(path[at + 1].removeprefix("block_")), len(slots[path[:at]])
        for i, layer in enumerate(leaf):
            out[(*path[:at], f"block_{i * period + slot}", *path[at + 2 :])] = layer
    return traverse_util.unflatten_dict(out)


def stack(params: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """The inverse of `unstack` for a spec with `scan` on; leaves it alone otherwise."""
    out, groups = {}, defaultdict(dict)
    for path, leaf in traverse_util.flatten_dict(params).items():
        side = spec.of("encoder" if "encoder" in path else "decoder")
        at = next((i for i, name in enumerate(path) if name.startswith("block_")), None)
        layer = -1 if at is None else int(path[at].removeprefix("block_"))
        if at is None or layer >= side.scanned * side.period:
            out[path] = leaf
        else:
            slot = f"block_{layer % side.period}"
            groups[(*path[:at], "blocks", slot, *path[at + 1 :])][layer] = leaf
    out |= {path: jnp.stack([by[i] for i in sorted(by)]) for path, by in groups.items()}
    return traverse_util.unflatten_dict(out)
