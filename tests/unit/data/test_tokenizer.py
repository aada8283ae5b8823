"""Text to ids: control tokens typed by users stay text (design §4), and the ids agree with the model's."""

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lumina_ft.data.token_spec import DEMO_TOKENIZER, demo_spec
from lumina_ft.data.tokenizer import TextTokenizer, check_text_ids, copy_tokenizer, load_tokenizer, text_ids
from lumina_ft.errors import DataError
from lumina_ft.tokens import TOKEN_STRINGS, control_ids

DEMO = load_tokenizer("demo")


def save_tokenizer(directory: Path, model: models.Model, added: list[AddedToken], byte_level: bool = True) -> Path:
    """A tokenizer directory around `model`, with every control token, a pad token and `added`."""
    tokenizer = Tokenizer(model)
    if byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ["<pad>", *TOKEN_STRINGS.values()]])
    tokenizer.add_tokens(added)
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>"}))
    return directory


def added_contents(tokenizer: TextTokenizer) -> dict[str, int]:
    """Every added token of a tokenizer directory, special or not."""
    added = json.loads((tokenizer.directory / "tokenizer.json").read_text())["added_tokens"]
    return {token["content"]: token["id"] for token in added}


def byte_vocab() -> dict[str, int]:
    return {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def tool_tokens() -> list[AddedToken]:
    """Added tokens that are not special, with and without normalisation and stripping."""
    return [
        AddedToken("<think>", special=False),
        AddedToken("<|tool|>", special=False, normalized=False),
        AddedToken("<call>", special=False, lstrip=True, rstrip=True, single_word=True),
    ]


@pytest.fixture(params=["demo", "bpe", "bpe_whole_words", "wordpiece", "unigram"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> TextTokenizer:
    """Tokenizers whose models reach control strings in different ways."""
    if request.param == "demo":
        return DEMO
    if request.param == "bpe":
        return TextTokenizer(save_tokenizer(tmp_path / "t", models.BPE(byte_vocab(), []), tool_tokens()))
    if request.param == "bpe_whole_words":
        # The model itself holds control strings: as merged pieces, and as whole words with ignore_merges.
        vocab = byte_vocab() | {"<think>": 256, "<B": 257, "<BO": 258, "<BOI": 259, "<BOI>": 260}
        merges = [("<", "B"), ("<B", "O"), ("<BO", "I"), ("<BOI", ">")]
        model = models.BPE(vocab, merges, ignore_merges=True)
        return TextTokenizer(save_tokenizer(tmp_path / "t", model, tool_tokens()))
    letters = [chr(i) for i in range(33, 127)]
    if request.param == "wordpiece":
        vocab = {"[UNK]": 0, "<answer>": 1, "<think>": 2}
        for letter in letters:
            vocab |= {letter: len(vocab), f"##{letter}": len(vocab) + 1}
        model = models.WordPiece(vocab, unk_token="[UNK]")
        return TextTokenizer(save_tokenizer(tmp_path / "t", model, tool_tokens(), byte_level=False))
    pieces = [("<unk>", 0.0), ("<answer>", -1.0), ("<think>", -1.0), *((letter, -9.0) for letter in letters)]
    model = models.Unigram(pieces, unk_id=0, byte_fallback=False)
    return TextTokenizer(save_tokenizer(tmp_path / "t", model, tool_tokens(), byte_level=False))


def test_every_special_and_added_token_typed_by_a_user_stays_text(tokenizer: TextTokenizer) -> None:
    added = added_contents(tokenizer)
    assert set(TOKEN_STRINGS.values()) <= set(added)
    for token, own_id in added.items():
        for text in (token, f"say {token} now", f"a{token}b", token * 2):
            ids = tokenizer.encode_text(text).tolist()
            assert own_id not in ids, token
            assert not set(ids) & set(added.values()), token
            assert len(ids) > 1, f"{token} became one id"


def test_the_check_above_can_fail() -> None:
    backend = Tokenizer.from_file(str(DEMO_TOKENIZER / "tokenizer.json"))
    assert backend.encode("<answer>").ids == [DEMO.token_id("<answer>")]


@given(st.text(max_size=40), st.sampled_from(sorted(TOKEN_STRINGS.values())), st.text(max_size=40))
def test_any_text_around_a_control_string_comes_back_unchanged(before: str, token: str, after: str) -> None:
    text = before + token + after
    ids = DEMO.encode_text(text)
    assert ids.dtype == np.int32
    assert not set(ids.tolist()) & control_ids(demo_spec().text)
    assert DEMO.decode(ids) == text


def test_encoding_equals_the_plain_tokenizer_where_no_control_token_occurs() -> None:
    backend = Tokenizer.from_file(str(DEMO_TOKENIZER / "tokenizer.json"))
    for text in ("draw a seven", "\nwhich digit is this?", "", "  two\u2028lines\r\n", "日本語 🙂"):
        assert DEMO.encode_text(text).tolist() == backend.encode(text).ids


def test_decode_leaves_control_tokens_out_unless_asked() -> None:
    ids = [*DEMO.encode_text("seven"), DEMO.token_id("</answer>")]
    assert DEMO.decode(ids) == "seven"
    assert DEMO.decode(ids, keep_control=True) == "seven</answer>"


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(DataError, match=r"'a\\ud800' — holds a lone surrogate"):
        DEMO.encode_text("a\ud800")


def test_demo_vocabulary_has_512_small_files_and_the_ids_of_demo_spec() -> None:
    assert DEMO.vocab_rows == 512
    assert sum(path.stat().st_size for path in DEMO_TOKENIZER.iterdir()) < 100_000
    assert text_ids(DEMO) == demo_spec().text
    assert len(control_ids(text_ids(DEMO))) == len(TOKEN_STRINGS) + 1


def test_digit_words_are_single_tokens_so_that_the_demo_is_short() -> None:
    from lumina_ft.data.digits import DIGIT_WORDS

    assert all(len(DEMO.encode_text(word)) == 1 for word in DIGIT_WORDS)


def test_ids_that_disagree_with_the_model_name_token_and_both_ids() -> None:
    ours = text_ids(DEMO)
    theirs = replace(ours, boa=7, pad=9)
    with pytest.raises(DataError, match=r"<answer> has id 504, the model's table in config.json says 7 \(and 1 more\)"):
        check_text_ids(ours, theirs, directory=DEMO.directory, model_source="config.json")
    check_text_ids(ours, ours, directory=DEMO.directory, model_source="config.json")


def test_missing_control_token_or_pad_is_named(tmp_path: Path) -> None:
    backend = json.loads((DEMO_TOKENIZER / "tokenizer.json").read_text())
    kept = [token for token in backend["added_tokens"] if token["content"] != "<BOI>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps({**backend, "added_tokens": kept}))
    shutil.copy(DEMO_TOKENIZER / "tokenizer_config.json", tmp_path)
    with pytest.raises(DataError, match="lacks <BOI> — every control token must be one token"):
        text_ids(TextTokenizer(tmp_path))
    shutil.copy(DEMO_TOKENIZER / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match="has no pad token"):
        text_ids(TextTokenizer(tmp_path))


def test_missing_directory_and_broken_file_are_one_line_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere — is not a directory"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(DataError, match="has no tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{]")
    with pytest.raises(DataError, match="must be a valid tokenizer"):
        load_tokenizer(tmp_path)


def test_identity_survives_copying_and_resaving_and_sees_any_change(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    copy_tokenizer(DEMO.directory, tmp_path / "copy")
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == (DEMO_TOKENIZER / "tokenizer.json").read_bytes()
    assert load_tokenizer(tmp_path / "copy").identity == DEMO.identity
    PreTrainedTokenizerFast.from_pretrained(DEMO_TOKENIZER).save_pretrained(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").identity == DEMO.identity
    changed = json.loads((DEMO_TOKENIZER / "tokenizer.json").read_text())
    changed["model"]["merges"].pop()
    (tmp_path / "copy" / "tokenizer.json").write_text(json.dumps(changed))
    assert load_tokenizer(tmp_path / "copy").identity != DEMO.identity


def test_encoder_survives_pickling_for_worker_processes(tokenizer: TextTokenizer) -> None:
    clone = pickle.loads(pickle.dumps(tokenizer.encoder))
    text = "draw <answer> a seven"
    assert clone.encode(text).tolist() == tokenizer.encode_text(text).tolist()
    assert clone.forbidden == tokenizer.encoder.forbidden
