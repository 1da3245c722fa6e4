"""Tokenizers by name, the built-in byte tokenizer, and a fingerprint by which a token file identifies its tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenmix_core._utils.trust import from_pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

BYTES = "bytes"
BYTE_SPECIALS = {"pad_token": "<|pad|>", "bos_token": "<|begin|>", "eos_token": "<|end|>"}
# a text for which different tokenizers produce different tokens: case, digits, white space, accents, scripts, symbols
PROBE = (
    "The quick brown Fox, 12345 and 3.14e-5;\n\tdef f(x):\r\n        return x  # naïve café Ωμέγα 漢字 😀 "
    "don't can't we'll http://a.b/c?d=e&f=%20 <tag attr='1'/> {}[]()\\|~`^$ AAAAAAAA        end"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return the built-in tokenizer: token b < 256 is byte b of the UTF-8 text, 256 is padding, 257 bos, 258 eos.

    Decoding the tokens of a text returns the text unchanged. It is a fast tokenizer of transformers, so it can be saved
    with a model and loaded by `AutoTokenizer`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bpe = models.BPE(vocab={char: byte for byte, char in enumerate(_printable_bytes())}, merges=[])
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(BYTE_SPECIALS.values()))
    # encode text that spells a special token as bytes, so that it cannot end a document
    options = {"clean_up_tokenization_spaces": False, "split_special_tokens": True}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options, **BYTE_SPECIALS)


def _printable_bytes() -> list[str]:
    """Return the character of byte-level BPE for each byte: the byte's own if printable, else one from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer: the built-in one for "bytes", else the one in the folder `name` or of this name on the hub.

    Raises:
        ValueError: there is no tokenizer of this name, or it has no token that ends a document.
    """
    if name == BYTES:
        return byte_tokenizer()
    from transformers import AutoTokenizer

    try:
        tokenizer = from_pretrained(AutoTokenizer, name)
    except ImportError:
        raise
    except Exception as error:
        # the library raises plain errors of class Exception for a damaged file
        reason = str(error).strip().splitlines()
        raise ValueError(
            f"tokenizer {name!r} could not be loaded ({reason[0] if reason else type(error).__name__}); "
            f"expected {BYTES!r}, a folder with a saved tokenizer, or a name on the hub"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer {name!r} has no eos_token, which must end every document")
    return tokenizer


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, special_tokens: bool = False
) -> list[list[int]]:
    """Return the tokens of each text, without added bos and eos tokens.

    Args:
        tokenizer: the tokenizer.
        texts: the texts.
        special_tokens: whether text that spells a special token becomes that token.
    """
    # a tokenizer with `split_special_tokens` never turns text into special tokens
    split = not special_tokens or tokenizer.split_special_tokens
    return tokenizer(list(texts), add_special_tokens=False, verbose=False, split_special_tokens=split)["input_ids"]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a sha256 of a tokenizer's vocabulary, its special tokens, and its tokens for a probe text.

    Tokenizers with equal fingerprints are taken to produce equal tokens, whatever their library version or folder.
    """
    content = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "special": sorted((k, str(v)) for k, v in tokenizer.special_tokens_map.items()),
        "probe": tokenizer(PROBE, add_special_tokens=False)["input_ids"],
    }
    return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()
