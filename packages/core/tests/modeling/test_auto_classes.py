"""Test that transformers' auto classes know our models, whichever package is imported first, at no cost until used."""

import json
import subprocess
import sys

import pytest

LOOKUP = "from transformers import AutoConfig; print(AutoConfig.from_pretrained({folder!r}).model_type)"
QUIET = "import sys; assert not {'torch', 'transformers', 'triton'} & set(sys.modules)"


def run(*lines):
    return subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=300)


OTHERS = """
from transformers import CONFIG_MAPPING
assert CONFIG_MAPPING['llama'].__name__ == 'LlamaConfig' and 'no_such_model' not in CONFIG_MAPPING
assert 'tokenmix_core.modeling' not in sys.modules
assert 'tokenmix_hybrid' in CONFIG_MAPPING and 'tokenmix_core.modeling' in sys.modules
"""


@pytest.mark.parametrize(
    "lines",
    [
        ("import tokenmix_core", QUIET, OTHERS),
        ("from transformers import AutoConfig, AutoModelForCausalLM", "import tokenmix_core"),
    ],
    ids=["core first", "auto classes first"],
)
def test_importing_the_package_is_enough_and_other_models_do_not_import_ours(lines, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "tokenmix_hybrid", "num_hidden_layers": 2}))
    build = "from transformers import AutoModelForCausalLM as A; import torch"
    meta = (
        f"with torch.device('meta'): print(type(A.from_config(AutoConfig.from_pretrained({str(tmp_path)!r}))).__name__)"
    )
    done = run(*lines, LOOKUP.format(folder=str(tmp_path)), build, meta)
    assert done.stdout.split() == ["tokenmix_hybrid", "HybridForCausalLM"], done.stderr[-800:]
