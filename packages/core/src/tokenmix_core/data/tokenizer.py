"""Tokenizers by name, the built-in byte tokenizer, and the fingerprint that ties a token file to its tokenizer."""

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
# text that tokenizers disagree about: case, digits, white space, accents, scripts, symbols, line ends
PROBE = (
    "The quick brown Fox, 12345 and 3.14e-5;\n\tdef f(x):\r\n        return x  # naïve café Ωμέγα 漢字 😀 "
    "don't can't we'll http://a.b/c?d=e&f=%20 <tag attr='1'/> {}[]()\\|~`^$ AAAAAAAA        end"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The built-in tokenizer: token b is byte b of the UTF-8 text; 256 pads, 257 begins and 258 ends a document.

    Every text comes back from its tokens unchanged. It is an ordinary fast tokenizer of transformers, so it is saved
    with a model and loaded by `AutoTokenizer`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bpe = models.BPE(vocab={char: byte for byte, char in enumerate(_printable_bytes())}, merges=[])
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(BYTE_SPECIALS.values()))
    # a text that names a special token is bytes like any other, and cannot end a document
    options = {"clean_up_tokenization_spaces": False, "split_special_tokens": True}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options, **BYTE_SPECIALS)


def _printable_bytes() -> list[str]:
    """Return byte-level BPE's character for each byte: the byte itself if printable, else one from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer called `name`: "bytes" for the built-in one, else one of the hub or of a folder.

    Raises:
        ValueError: there is none of that name, or it has no token that ends a document.
    """
    if name == BYTES:
        return byte_tokenizer()
    from transformers import AutoTokenizer

    try:
        tokenizer = from_pretrained(AutoTokenizer, name)
    except ImportError:
        raise
    except Exception as error:
        # the library raises plain exceptions for a damaged file
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
    """Return the tokens of texts, without tokens that begin or end them.

    Args:
        tokenizer: the tokenizer.
        texts: the texts.
        special_tokens: whether text that spells a special token becomes that token.
    """
    # a tokenizer that splits them always keeps to that
    split = not special_tokens or tokenizer.split_special_tokens
    return tokenizer(list(texts), add_special_tokens=False, verbose=False, split_special_tokens=split)["input_ids"]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """A sha256 of what a tokenizer does: its vocabulary, its special tokens, and how it splits a probe text.

    Two tokenizers with one fingerprint give the same tokens, whichever library version or folder they came from.
    """
    content = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "special": sorted((k, str(v)) for k, v in tokenizer.special_tokens_map.items()),
        "probe": tokenizer(PROBE, add_special_tokens=False)["input_ids"],
    }
    return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()
