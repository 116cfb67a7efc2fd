"""How a sublayer joins the residual stream. PLACEMENTS: where the norm stands, (x, f) -> x.
ORDERS: whether the sublayers of a block follow one another or run side by side.

A placement owns its rule for initialisation (`gain`) and says whether the stack ends with a norm
(`final_norm`). To add one, write a subclass of Placement and give it a line in PLACEMENTS.
"""

import functools
import operator
from collections.abc import Callable

import flax.linen as nn

from transformer.layers.base import Array, Dims
from transformer.spec import Choice

Sublayer = Callable[[Array], Array]


class Placement(nn.Module):
    """x + f(x): a residual without any norm; the base of every placement."""

    spec: Dims
    norm: Choice

    final_norm = False

    @nn.compact
    def __call__(self, x_BTD: Array, f: Sublayer) -> Array:
        return x_BTD + f(x_BTD)

    @staticmethod
    def gain(spec: Dims, role: str) -> float:
        """Factor on the initial standard deviation of projections with this role."""
        return 1.0


class Pre(Placement):
    """x + f(norm(x)) (Baevski & Auli 2019; Xiong et al. 2020; GPT-2)."""

    final_norm = True

    @nn.compact
    def __call__(self, x_BTD, f):
        return x_BTD + f(self.norm(self.spec, name="norm")(x_BTD))


class Post(Placement):
    """norm(x + f(x)) (Vaswani et al. 2017; BERT)."""

    @nn.compact
    def __call__(self, x_BTD, f):
        return self.norm(self.spec, name="norm")(x_BTD + f(x_BTD))


class Sandwich(Placement):
    """x + norm(f(norm(x))) (Ding et al. 2021; Gemma 2)."""

    final_norm = True

    @nn.compact
    def __call__(self, x_BTD, f):
        y_BTD = f(self.norm(self.spec, name="norm")(x_BTD))
        return x_BTD + self.norm(self.spec, name="norm_out")(y_BTD)


class PostSublayer(Placement):
    """x + norm(f(x)) (Liu et al. 2021, Swin v2; OLMo 2)."""

    final_norm = True

    @nn.compact
    def __call__(self, x_BTD, f):
        return x_BTD + self.norm(self.spec, name="norm")(f(x_BTD))


class DeepNorm(Placement):
    """norm(alpha * x + f(x)), with value, output and FFN projections initialised smaller by beta
    (Wang et al. 2022, table 1: alpha and beta from the depths of both stacks)."""

    @nn.compact
    def __call__(self, x_BTD, f):
        alpha, _ = deepnorm_constants(self.spec)
        return self.norm(self.spec, name="norm")(x_BTD * alpha + f(x_BTD))

    @staticmethod
    def gain(spec, role):
        return deepnorm_constants(spec)[1] if role in ("value", "out", "up", "down") else 1.0


def deepnorm_constants(spec: Dims) -> tuple[float, float]:
    """alpha and beta for N encoder and M decoder layers."""
    n, m = spec.depths
    if not (n and m):
        return (2 * (n + m)) ** 0.25, (8 * (n + m)) ** -0.25
    if spec.side == "encoder":
        return 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)
    return (3 * m) ** 0.25, (12 * m) ** -0.25


PLACEMENTS = {
    "pre": Pre,
    "post": Post,
    "sandwich": Sandwich,
    "post_sublayer": PostSublayer,
    "deepnorm": DeepNorm,
    "none": Placement,
}


def sequential(x_BTD: Array, around: Callable[[str], Placement], sublayers: dict[str, Sublayer]):
    """One sublayer after the other, each in a residual of its own."""
    for name, f in sublayers.items():
        x_BTD = around(name)(x_BTD, f)
    return x_BTD


def parallel(x_BTD: Array, around: Callable[[str], Placement], sublayers: dict[str, Sublayer]):
    """All sublayers on the same input, summed into one residual (Wang & Komatsuzaki 2021, GPT-J;
    PaLM)."""

    def together(h_BTD: Array) -> Array:
        return functools.reduce(operator.add, (f(h_BTD) for f in sublayers.values()))

    return around("block")(x_BTD, together)


ORDERS = {"sequential": sequential, "parallel": parallel}
