"""A laboratory for Transformers: every variant from one config, trained, resumed and compared.

    import transformer
    run = transformer.load("runs/lm")
    run.generate(["To be"], max_new_tokens=64, temperature=0.8)

`transformer.train(config, workdir)` is what train.py calls, and configs start from `defaults()`.
"""

import importlib

_DOORS = {"load": "workdir", "train": "experiment", "defaults": "experiment"}


def __dir__() -> list[str]:
    return sorted(_DOORS)


def __getattr__(name: str):
    # Late, so that reading a config or a spec does not wait for JAX.
    if name in _DOORS:
        return getattr(importlib.import_module(f"transformer.{_DOORS[name]}"), name)
    raise AttributeError(f"module 'transformer' has no attribute {name!r}")
