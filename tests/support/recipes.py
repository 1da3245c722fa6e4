"""Check every recipe of a package by a contract."""

from __future__ import annotations

from tokenmix_core.training import Recipe, overridden


def check_shrinks(recipe: Recipe) -> None:
    """Assert that flags can set each size of a recipe's model, alone and all together.

    No flags for the layers' mixers or for heads are needed; models of few layers keep as many kinds of mixers as fit.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 512, "max_position_embeddings": 128}
    flags = {name: [f"--model.{name}={value}"] for name, value in sizes.items()}
    kinds = set(recipe.model_config().mixers)
    for layers in (1, 2, 5):
        config = overridden(recipe, [f"--model.num_hidden_layers={layers}"]).model_config()
        assert config.num_hidden_layers == len(config.mixers) == layers
        assert len(set(config.mixers)) == min(layers, len(kinds))
    for name, flag in flags.items():
        assert getattr(overridden(recipe, flag).model_config(), name) == sizes[name]
    together = overridden(
        recipe, ["--model.num_hidden_layers=2", *(flag for given in flags.values() for flag in given)]
    )
    # a resumed run gets the fields from its manifest, which must give the same recipe
    assert overridden(recipe, config=together.values()) == together
