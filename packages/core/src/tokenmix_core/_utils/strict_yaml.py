"""Load YAML but refuse duplicate keys, of which PyYAML's loaders silently take the last."""

from __future__ import annotations

from typing import Any

import yaml


class _UniqueKeys(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        # check before the base class merges mappings: a mapping may override keys of a merged one
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                told = f"the key {key.value!r} occurs twice"
                raise yaml.constructor.ConstructorError(None, None, told, key.start_mark)
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """Return the content of a YAML text as plain data.

    Raises:
        yaml.YAMLError: the text is not valid YAML, or a mapping contains a key twice.
    """
    # this is safe: the loader is a subclass of SafeLoader
    return yaml.load(text, _UniqueKeys)
