"""Text to ids. Text that users type can never become a control token.

A tokenizer directory is read through transformers; user text goes through a second encoder that is the same tokenizer
without any added token, so `<answer>` in a prompt is five harmless pieces (design §4).
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from lumina_ft.data.token_spec import DEMO_TOKENIZER
from lumina_ft.errors import DataError
from lumina_ft.tokens import TOKEN_STRINGS, TextIds

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that make up a tokenizer in a model directory; copied as they are."""


class PlainEncoder:
    """Encodes user text; picklable, so worker processes can hold one.

    Attributes:
        forbidden: ids of all added tokens (special or not), except the unknown token; never produced.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        """Build from a parsed `tokenizer.json`; `spec` is changed in place."""
        unknown = _unknown_id(spec["model"])
        self.forbidden = frozenset(int(token["id"]) for token in spec["added_tokens"]) - {unknown}
        self._tokenizer = Tokenizer.from_str(json.dumps(_without_added_tokens(spec, self.forbidden)))

    def encode(self, text: str) -> NDArray[np.int32]:
        """Ids of `text`, [n] int32.

        Raises:
            DataError: a lone surrogate, which no tokenizer can encode, or a model that still yields a control token.
        """
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError) as exc:
            raise DataError(f"text {_excerpt(text)} — holds a lone surrogate — must be valid Unicode — fix it") from exc
        if not self.forbidden.isdisjoint(ids):
            raise DataError(f"text {_excerpt(text)} — becomes a control token — this tokenizer's model can't avoid it")
        return np.asarray(ids, dtype=np.int32)


class TextTokenizer:
    """A tokenizer directory.

    Attributes:
        directory: where its files are.
        identity: `sha256:…` over vocabulary, merges, added tokens and rules; equal for a copied directory.
        vocab_rows: largest id plus one.
        encoder: `PlainEncoder` for user text.
    """

    def __init__(self, directory: Path) -> None:
        """Load `directory`.

        Raises:
            DataError: it is missing, has no `tokenizer.json`, or that file is broken.
        """
        from transformers import PreTrainedTokenizerFast

        if not (directory / "tokenizer.json").is_file():
            what = "has no tokenizer.json" if directory.is_dir() else "is not a directory"
            raise DataError(
                f"tokenizer={directory} — {what} — must be `demo` or a directory with a fast tokenizer — save it with "
                "tokenizer.save_pretrained"
            )
        try:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        except Exception as exc:  # the tokenizers library raises bare Exception on a bad file
            raise DataError(f"tokenizer={directory} — {exc} — tokenizer.json must be a valid tokenizer") from exc
        spec = json.loads(self._tokenizer.backend_tokenizer.to_str())
        self.directory = directory
        self.identity = _identity(spec)
        self.vocab_rows = 1 + max(self._tokenizer.get_vocab().values())
        self.encoder = PlainEncoder(spec)

    def encode_text(self, text: str) -> NDArray[np.int32]:
        """Ids of user text, [n] int32: control tokens typed in it stay text."""
        return self.encoder.encode(text)

    def decode(self, ids: Sequence[int] | NDArray[np.integer], *, keep_control: bool = False) -> str:
        """Text of `ids`; control tokens are left out unless `keep_control`."""
        chosen = [int(i) for i in ids if keep_control or int(i) not in self.encoder.forbidden]
        return self._tokenizer.decode(chosen, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def token_id(self, token: str) -> int | None:
        """Id of one token string, None if the vocabulary lacks it."""
        found = self._tokenizer.convert_tokens_to_ids(token)
        # Tokenizers with an unknown token answer its id for everything they don't know.
        known = isinstance(found, int) and self._tokenizer.convert_ids_to_tokens(found) == token
        return found if known else None

    @property
    def pad_token_id(self) -> int | None:
        return self._tokenizer.pad_token_id


def load_tokenizer(name: str | Path) -> TextTokenizer:
    """Load a tokenizer directory, or the shipped one for `demo`.

    Raises:
        DataError: see `TextTokenizer`.
    """
    return TextTokenizer(DEMO_TOKENIZER if str(name) == "demo" else Path(name))


def text_ids(tokenizer: TextTokenizer) -> TextIds:
    """Control ids as the tokenizer has them.

    Raises:
        DataError: a control token or the pad token is missing.
    """
    ids = {name: tokenizer.token_id(token) for name, token in TOKEN_STRINGS.items()}
    missing = [TOKEN_STRINGS[name] for name, value in ids.items() if value is None]
    if missing:
        raise DataError(
            f"tokenizer={tokenizer.directory} — lacks {', '.join(missing)} — every control token must be one token — "
            "add them with tokenizer.add_special_tokens"
        )
    if tokenizer.pad_token_id is None:
        raise DataError(
            f"tokenizer={tokenizer.directory} — has no pad token — one is needed — set pad_token in its config"
        )
    found = {name: value for name, value in ids.items() if value is not None}
    return TextIds(**found, pad=tokenizer.pad_token_id)


def check_text_ids(tokenizer: TextIds, model: TextIds, *, directory: Path, model_source: str) -> None:
    """Compare the tokenizer's control ids with the model's table.

    Raises:
        DataError: they differ; names the first token and both ids, and counts the rest.
    """
    pairs = [(f.name, getattr(tokenizer, f.name), getattr(model, f.name)) for f in fields(TextIds)]
    wrong = [(name, ours, theirs) for name, ours, theirs in pairs if ours != theirs]
    if not wrong:
        return
    name, ours, theirs = wrong[0]
    token = TOKEN_STRINGS.get(name, "the pad token")
    rest = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    raise DataError(
        f"tokenizer={directory} — {token} has id {ours}, the model's table in {model_source} says {theirs}{rest} — "
        "both must agree — use the tokenizer that belongs to the model"
    )


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy a tokenizer's files byte by byte into `target`, which is created."""
    target.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _identity(spec: dict[str, Any]) -> str:
    kept = {key: value for key, value in spec.items() if key not in ("truncation", "padding")}
    canonical = json.dumps(kept, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def _unknown_id(model: dict[str, Any]) -> int | None:
    """Id that stands for text the vocabulary can't express; byte-level models have none."""
    if model["type"] == "Unigram":
        return model.get("unk_id")
    return model["vocab"].get(model.get("unk_token"))


def _without_added_tokens(spec: dict[str, Any], forbidden: frozenset[int]) -> dict[str, Any]:
    """The same tokenizer with no added tokens, and with their strings taken out of the model itself.

    The second part matters because some models look whole words up in their vocabulary (WordLevel, Unigram, BPE with
    ignore_merges), where control tokens have entries too.
    """
    spec.update(added_tokens=[], truncation=None, padding=None, post_processor=None)
    model = spec["model"]
    if model["type"] == "Unigram":
        # Ids are list positions: the entry stays and its string becomes one that no text contains.
        for index in forbidden & set(range(len(model["vocab"]))):
            marker = hashlib.sha256(f"removed {index}".encode()).hexdigest()
            model["vocab"][index] = [marker, model["vocab"][index][1]]
        return spec
    removed = {token for token, index in model["vocab"].items() if index in forbidden}
    if not removed:
        return spec
    model["vocab"] = {token: index for token, index in model["vocab"].items() if token not in removed}
    if model["type"] == "BPE":
        prefix = len(model.get("continuing_subword_prefix") or "")
        merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"]]
        model["merges"] = [
            [left, right] for left, right in merges if not removed & {left, right, left + right[prefix:]}
        ]
    return spec


def _excerpt(text: str) -> str:
    return ascii(text if len(text) <= 40 else text[:40] + "…")
