"""Make the demo tokenizer: a byte-level BPE of 512 entries, control tokens included.

    python scripts/make_demo_tokenizer.py

Trains on sentences about digits and drawing, and writes lumina_ft/data/demo_tokenizer/. The result is committed: run
this again only to change the vocabulary, because every demo dataset and checkpoint depends on its ids.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from lumina_ft.data.digits import ASK_PROMPTS, DIGIT_WORDS, DRAW_PROMPTS, draw_prompt
from lumina_ft.data.prompts import SYSTEM_PROMPTS
from lumina_ft.tokens import TOKEN_STRINGS

TARGET = Path(__file__).resolve().parents[1] / "lumina_ft" / "data" / "demo_tokenizer"
VOCAB_SIZE = 512
PAD = "<|pad|>"
SENTENCES = (
    "The picture shows a handwritten digit, drawn with a thick pen on dark paper.",
    "Draw the number with a few round strokes, then write its name below the image.",
    "A seven has one flat line and one long stroke; a four has three lines.",
    "Which of these two digits is larger? The second one, because nine comes after eight.",
    "Count from zero to nine: zero, one, two, three, four, five, six, seven, eight, nine.",
    "What comes after six? Seven. What comes before three? Two.",
    "This image is blurred, so the answer may be wrong; look at it again.",
    "Show me the colours inverted: dark strokes on a light background.",
    "Describe the drawing in a short sentence.",
    "The sum of two and three is five, and the sum of four and four is eight.",
)


def corpus() -> list[str]:
    """Training lines. The demo's own prompts and answers weigh most, so digit words become single tokens."""
    lines = list(SENTENCES) + list(SYSTEM_PROMPTS.values())
    for digit, word in enumerate(DIGIT_WORDS):
        prompts = [draw_prompt(digit, i) for i in range(len(DRAW_PROMPTS))]
        lines += 20 * [*prompts, word] + [f"The digit {digit} is written {word}."] * 5
    lines += 40 * [f"\n{question}" for question in ASK_PROMPTS]
    # Every demo sample starts with one of these: short prefixes are faster demos.
    return lines + 30 * [SYSTEM_PROMPTS[task] for task in ("text", "understand", "t2i")]


def main() -> None:
    """Train, add the control tokens at the end of the vocabulary, write two files."""
    control = [PAD, *TOKEN_STRINGS.values()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(control),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise SystemExit(
            f"vocabulary has {tokenizer.get_vocab_size()} entries, expected {VOCAB_SIZE}: enlarge corpus()"
        )
    TARGET.mkdir(parents=True, exist_ok=True)
    (TARGET / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 16384,
    }
    (TARGET / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    print(f"{TARGET}: {VOCAB_SIZE} entries; seven -> {tokenizer.encode('seven').tokens}")


if __name__ == "__main__":
    main()
